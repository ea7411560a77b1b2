"""Who owns a state directory; log files; sockets that nobody listens on."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from libs.service.config import ConfigError
from services.cli import logfile, machine, running
from services.cli.progress import Progress
from services.cli.running import Running, StateDirBusy, StateLock

HOLD = "import sys, time; from pathlib import Path; from services.cli.running import *\n" \
       "lock = StateLock(Path(sys.argv[1])); lock.acquire(); lock.publish(Running(7, 'nats://x:1', None))\n" \
       "print('held', flush=True); time.sleep(60)"  # fmt: skip


def test_the_second_is_told_who_the_first_is(tmp_path: Path) -> None:
    with StateLock(tmp_path) as lock:
        lock.publish(Running(pid=123, nats_url="nats://127.0.0.1:5", address="http://127.0.0.1:8000"))
        with pytest.raises(StateDirBusy, match=r"process id 123 at http://127.0.0.1:8000.*--state-dir"):
            StateLock(tmp_path).acquire()
        assert running.find(tmp_path) == Running(123, "nats://127.0.0.1:5", "http://127.0.0.1:8000")
    assert running.find(tmp_path) is None
    with StateLock(tmp_path):
        assert running.find(tmp_path) is None  # starting: nothing is published yet


def test_a_lock_dies_with_its_owner(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": root},
        stdout=subprocess.PIPE,
    )
    try:
        assert owner.stdout is not None and owner.stdout.readline() == b"held\n"
        found = running.find(tmp_path)
        assert found is not None and found.pid == 7
    finally:
        owner.kill()
        owner.communicate()
    assert running.find(tmp_path) is None  # though the file still says 7
    with StateLock(tmp_path):
        pass


def test_readers_do_not_keep_an_owner_out(tmp_path: Path) -> None:
    ended = threading.Event()

    def read() -> None:
        while not ended.is_set():
            running.find(tmp_path)
            time.sleep(0.0001)

    readers = [threading.Thread(target=read) for _ in range(2)]
    for reader in readers:
        reader.start()
    try:
        for _ in range(50):
            with StateLock(tmp_path):
                time.sleep(0.0005)
    finally:
        ended.set()
        for reader in readers:
            reader.join()


def test_a_half_written_lock_file_is_nobody_yet(tmp_path: Path) -> None:
    with StateLock(tmp_path):
        (tmp_path / "run" / running.LOCK_NAME).write_text('{"pid": 1')
        assert running.find(tmp_path) is None
        with pytest.raises(StateDirBusy, match="another `baton up` already"):
            StateLock(tmp_path).acquire()


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError, match=rf"port {port} on 127.0.0.1 is in use.*--port"):
            machine.free_port("127.0.0.1", port)
    assert machine.free_port("127.0.0.1", port) == port
    assert machine.free_port("127.0.0.1", 0) > 0


def test_a_host_that_is_not_here_is_named() -> None:
    with pytest.raises(ConfigError, match=r"203\.0\.113\.7"):
        machine.free_port("203.0.113.7", 8000)


def test_only_dead_sockets_are_removed(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as live, socket.socket(socket.AF_UNIX) as dead:
        live.bind(str(tmp_path / "live.sock"))
        live.listen()
        dead.bind(str(tmp_path / "dead.sock"))
        dead.listen()
        dead.close()
        machine.remove_dead_sockets(tmp_path)
        assert [path.name for path in tmp_path.iterdir()] == ["live.sock"]
    machine.remove_dead_sockets(tmp_path / "absent")


def test_cores_are_those_this_process_may_use() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert machine.cores() == 1
    finally:
        os.sched_setaffinity(0, allowed)


def test_a_log_starts_anew_and_stays_short(tmp_path: Path) -> None:
    path = tmp_path / "logs" / "a.log"
    with logfile.open_log(path) as log:
        log.write(b"one\ntwo\nthree\n")
        assert logfile.tail(path, max_lines=2) == ["two", "three"]
        logfile.shorten(path, max_bytes=5)
        assert logfile.tail(path, max_lines=2) == []
        log.write(b"four\n")  # its writer never noticed
    assert path.read_bytes() == b"four\n"
    assert (tmp_path / "logs" / "a.log.1").read_bytes() == b"one\ntwo\nthree\n"
    logfile.rotate(path)
    assert not path.exists() and (tmp_path / "logs" / "a.log.1").read_bytes() == b"four\n"
    assert logfile.tail(path, max_lines=2) == []


def test_log_lines_become_readable() -> None:
    line = '{"error": "no file x", "event": "cannot serve", "level": "error", "timestamp": "T", "service": "decode"}'
    assert logfile.readable(line) == "error: cannot serve, error=no file x"
    line = '{"event": "crashed", "level": "critical", "exception": "Traceback\\nKeyError"}'
    assert logfile.readable(line) == "critical: crashed\nTraceback\nKeyError"
    for line in ("Illegal instruction", "{half", "[1]", '{"a": 1}', "null", ""):
        assert logfile.readable(line) == line


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_live_line_on_a_terminal_and_few_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    terminal, pipe = Terminal(), io.StringIO()
    now = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    for stream in (terminal, pipe):
        progress = Progress(stream)
        for _ in range(50):
            progress.wait("waiting for decode-1")
        progress.line("ready")
    assert pipe.getvalue() == "waiting for decode-1\nready\n"
    assert terminal.getvalue().count("\n") == 1
    assert terminal.getvalue().endswith("\r\x1b[Kready\n")
