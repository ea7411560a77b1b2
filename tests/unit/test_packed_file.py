"""The shared file of packed weights: what it holds, who makes it, and what happens when that goes wrong."""

from __future__ import annotations

import errno
import fcntl
import io
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from structlog.testing import capture_logs

from libs.checkpoint.open import Checkpoint, CheckpointError, open_checkpoint, resolve_model
from libs.engine.model import packed_folder
from libs.engine.model.packed import PackedModel, open_packed, pack_source
from libs.engine.model.packed_file import PackedFileError, write_packed
from libs.engine.model.packed_recipe import checkpoint_recipe
from libs.engine.model.packing import unpack
from libs.kernels.native.formats import Format
from tests.checkpoints import tiny_model, write_gguf, write_hf

ROOT = Path(__file__).parents[2]
SEED = 20240607


@pytest.fixture(scope="module")
def gguf_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model("qwen2", tied_head=True)
    return write_gguf(model, tmp_path_factory.mktemp("gguf") / "tiny.gguf", quant="Q4_1")


@pytest.fixture
def checkpoint(gguf_path: Path) -> Checkpoint:
    return open_checkpoint(gguf_path)


def assert_holds(model: PackedModel, checkpoint: Checkpoint) -> None:
    """Every weight of the checkpoint, once."""
    assert sorted([*model.matrices, *model.vectors]) == sorted(checkpoint.tensor_names)
    assert model.config == checkpoint.config
    for name, matrix in model.matrices.items():
        np.testing.assert_array_equal(unpack(matrix), checkpoint.tensor(name), err_msg=name)
        assert not matrix.data.flags.writeable and matrix.data.ctypes.data % 64 == 0
        assert matrix.data.shape == (matrix.num_bytes,)
    for name, vector in model.vectors.items():
        np.testing.assert_array_equal(vector, checkpoint.tensor(name), err_msg=name)
        assert vector.dtype == np.float32 and vector.ndim == 1
        assert not vector.flags.writeable and vector.ctypes.data % 64 == 0


def files(cache: Path) -> list[str]:
    return sorted(path.name for path in (cache / "packed").iterdir() if path.name != "lock")


def the_file(cache: Path) -> Path:
    (name,) = files(cache)
    return cache / "packed" / name


def warnings(lines: list[Any]) -> list[str]:
    return [line["event"] for line in lines if line["log_level"] == "warning"]


class Progress:
    """Counts packing: a file that is only opened makes none."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        self.calls.append((done, total))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("quant", ["F32", "BF16", "Q8_0", "Q4_0"])
def test_gguf(tmp_path: Path, architecture: str, quant: str) -> None:
    path = write_gguf(tiny_model(architecture), tmp_path / "tiny.gguf", quant=quant)
    checkpoint = open_checkpoint(path)
    progress = Progress()
    model = open_packed(checkpoint, tmp_path, on_progress=progress)
    assert_holds(model, checkpoint)
    assert "head.weight" in model.matrices
    done, total = zip(*progress.calls, strict=True)
    assert sorted(done) == list(done) and set(total) == {done[-1]}
    assert model.num_bytes == the_file(tmp_path).stat().st_size
    stored = sum(matrix.num_bytes for matrix in model.matrices.values())
    assert stored < model.num_bytes < stored + 4 * 1200 + 16384  # vectors, header, table


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_safetensors(tmp_path: Path, dtype: str) -> None:
    checkpoint = open_checkpoint(write_hf(tiny_model("qwen3"), tmp_path / "tiny", dtype=dtype))
    model = open_packed(checkpoint, tmp_path)
    assert_holds(model, checkpoint)
    format = {"float32": Format.F32, "float16": Format.F16, "bfloat16": Format.BF16}[dtype]
    assert {matrix.format for matrix in model.matrices.values()} == {format}


def test_int8_has_a_file_of_its_own(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_hf(tiny_model(intermediate_size=80), tmp_path / "tiny"))
    plain = open_packed(checkpoint, tmp_path)
    small = open_packed(checkpoint, tmp_path, int8=True)
    assert len(files(tmp_path)) == 2 and small.num_bytes < plain.num_bytes / 2
    for name, matrix in small.matrices.items():
        # 80 is not whole groups of 32
        assert matrix.format is (Format.F32 if name.endswith("down.weight") else Format.Q8_F32)
        np.testing.assert_allclose(unpack(matrix), checkpoint.tensor(name), atol=0.02)
    assert_holds(open_packed(checkpoint, tmp_path), checkpoint)


def test_tied_head_is_kept_once(tmp_path: Path, checkpoint: Checkpoint) -> None:
    model = open_packed(checkpoint, tmp_path)
    assert_holds(model, checkpoint)
    assert "head.weight" not in model.matrices and "layers.0.q.bias" in model.vectors


def test_the_second_only_maps(tmp_path: Path, checkpoint: Checkpoint) -> None:
    open_packed(checkpoint, tmp_path)
    path, progress = the_file(tmp_path), Progress()
    os.utime(path, ns=(0, 0))
    before = path.stat()
    model = open_packed(checkpoint, tmp_path, on_progress=progress)
    assert_holds(model, checkpoint)
    assert progress.calls == [] and path.stat().st_ino == before.st_ino
    assert path.stat().st_mtime_ns > 0  # marked as used


def test_mapping_outlives_the_file(tmp_path: Path, checkpoint: Checkpoint) -> None:
    model = open_packed(checkpoint, tmp_path)
    the_file(tmp_path).unlink()
    assert_holds(model, checkpoint)


_CHILD = """
import os, signal, sys, time
from pathlib import Path
from libs.checkpoint.open import open_checkpoint
from libs.engine.model.packed import open_packed
from libs.engine.model.packing import unpack
checkpoint, packed = open_checkpoint(Path(sys.argv[1])), 0
def on_progress(done, total):
    global packed
    packed = 1
    time.sleep(0.01)  # about a third of a second in all: the others come meanwhile
    if sys.argv[3] == "die" and done > total // 2:
        os.kill(os.getpid(), signal.SIGKILL)
print("ready", flush=True)
sys.stdin.readline()
model = open_packed(checkpoint, Path(sys.argv[2]), on_progress=on_progress, wait_s=60)
same = all((unpack(m) == checkpoint.tensor(name)).all() for name, m in model.matrices.items())
print("packed" if packed else "mapped", same, flush=True)
"""


def start_child(gguf_path: Path, cache: Path, mode: str) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", _CHILD, str(gguf_path), str(cache), mode]
    pipe = subprocess.PIPE
    return subprocess.Popen(arguments, cwd=ROOT, stdin=pipe, stdout=pipe, stderr=pipe, text=True)


def test_four_processes_at_once(tmp_path: Path, gguf_path: Path) -> None:
    children = [start_child(gguf_path, tmp_path, "live") for _ in range(4)]
    for child in children:
        assert child.stdout is not None and child.stdout.readline() == "ready\n"
    for child in children:
        assert child.stdin is not None
        child.stdin.write("\n")
        child.stdin.flush()
    outputs = [child.communicate(timeout=120) for child in children]
    results = sorted(out.splitlines()[-1] for out, _ in outputs if out)
    assert results == ["mapped True"] * 3 + ["packed True"], outputs
    assert len(files(tmp_path)) == 1


def test_killed_packer(tmp_path: Path, gguf_path: Path, checkpoint: Checkpoint) -> None:
    child = start_child(gguf_path, tmp_path, "die")
    child.communicate("\n", timeout=60)
    assert child.returncode == -signal.SIGKILL
    (left,) = files(tmp_path)
    assert left.endswith(".tmp")
    with capture_logs() as lines:
        assert_holds(open_packed(checkpoint, tmp_path, wait_s=5), checkpoint)
    assert warnings(lines) == [] and the_file(tmp_path).suffix == ".baton"


def damages(path: Path, checkpoint: Checkpoint) -> Iterator[tuple[str, bytes]]:
    content = path.read_bytes()
    table_start = int.from_bytes(content[24:32], "little")
    recipe = checkpoint_recipe(checkpoint)
    source = random.Random(SEED)

    def flipped(place: int) -> bytes:
        return content[:place] + bytes([content[place] ^ 1 << source.randrange(8)]) + content[place + 1 :]

    yield from ((f"header byte {place}", flipped(place)) for place in range(40))
    for _ in range(8):
        place = source.randrange(table_start, len(content))
        yield f"table byte {place}", flipped(place)
    yield "first byte of the first matrix", flipped(4096)
    yield "last byte of the first matrix", flipped(4096 + recipe.parts[0].num_bytes - 1)
    yield "a hole of zeros", content[:8192] + bytes(4096) + content[12288:]
    for length in (0, 1, 39, 4095, 4096, table_start, len(content) - 1, source.randrange(len(content))):
        yield f"{length} bytes of {len(content)}", content[:length]
    yield "longer", content + b"\0"
    yield "noise", source.randbytes(len(content))


def test_damage_is_repaired_once(tmp_path: Path, checkpoint: Checkpoint) -> None:
    open_packed(checkpoint, tmp_path)
    path = the_file(tmp_path)
    sound = path.read_bytes()
    for what, content in damages(path, checkpoint):
        path.unlink()
        path.write_bytes(content)
        progress = Progress()
        with capture_logs() as lines:
            model = open_packed(checkpoint, tmp_path, on_progress=progress)
        assert warnings(lines) == ["packed weights are damaged and made again"], what
        assert progress.calls and the_file(tmp_path) == path and path.read_bytes() == sound, what
    assert_holds(model, checkpoint)
    with capture_logs() as lines:
        open_packed(checkpoint, tmp_path)
    assert lines == []


def test_file_of_another_model_under_this_name(tmp_path: Path, checkpoint: Checkpoint) -> None:
    other = open_checkpoint(write_gguf(tiny_model("qwen2"), tmp_path / "other.gguf", quant="Q4_0"))
    open_packed(other, tmp_path / "other")
    open_packed(checkpoint, tmp_path)
    the_file(tmp_path).write_bytes(the_file(tmp_path / "other").read_bytes())
    with capture_logs() as lines:
        assert_holds(open_packed(checkpoint, tmp_path), checkpoint)
    assert "holds" in lines[0]["reason"]


SHARED_NOT = ["packed weights cannot be shared: each process packs its own copy at every start"]


def test_full_disk(tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    reserve = os.posix_fallocate

    def full(descriptor: int, offset: int, size: int) -> None:
        if str(tmp_path) in str(Path(f"/proc/self/fd/{descriptor}").readlink()):
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(descriptor, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    with capture_logs() as lines:
        model = open_packed(checkpoint, tmp_path)
    assert_holds(model, checkpoint)
    assert warnings(lines) == SHARED_NOT and "No space" in lines[-1]["reason"]
    assert lines[-1]["mib_per_process"] == round(model.num_bytes / 2**20)
    assert files(tmp_path) == []  # nothing is left to fill the disk
    monkeypatch.undo()
    open_packed(checkpoint, tmp_path)
    assert len(files(tmp_path)) == 1


def test_file_system_that_cannot_reserve(
    tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(descriptor: int, offset: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr(os, "posix_fallocate", unsupported)
    with capture_logs() as lines:
        assert_holds(open_packed(checkpoint, tmp_path), checkpoint)
    assert warnings(lines) == [] and len(files(tmp_path)) == 1
    monkeypatch.undo()
    progress = Progress()
    open_packed(checkpoint, tmp_path, on_progress=progress)
    assert progress.calls == []


def test_folder_that_cannot_be_made(tmp_path: Path, checkpoint: Checkpoint) -> None:
    """As root no folder is read-only: a file stands in its place."""
    (tmp_path / "packed").write_text("in the way")
    with capture_logs() as lines:
        assert_holds(open_packed(checkpoint, tmp_path), checkpoint)
    assert warnings(lines) == SHARED_NOT


def test_waiting_ends(tmp_path: Path, checkpoint: Checkpoint) -> None:
    (tmp_path / "packed").mkdir()
    with (tmp_path / "packed" / "lock").open("w") as lock, capture_logs() as lines:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert_holds(open_packed(checkpoint, tmp_path, wait_s=0.2), checkpoint)
    assert [line["event"] for line in lines] == [
        "waiting for another process that packs weights",
        *SHARED_NOT,
    ]
    assert "0.2 s" in lines[1]["reason"]
    assert files(tmp_path) == []


def test_waiting_is_reported(tmp_path: Path, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_folder, "_REPORT_S", 0.1)
    (tmp_path / "packed").mkdir()
    with (tmp_path / "packed" / "lock").open("w") as lock, capture_logs() as lines:
        fcntl.flock(lock, fcntl.LOCK_EX)
        timer = threading.Timer(1.0, fcntl.flock, (lock, fcntl.LOCK_UN))
        timer.start()
        model = open_packed(checkpoint, tmp_path, wait_s=60)
        timer.join()
    events = [line["event"] for line in lines]
    assert events.count("waiting for another process that packs weights") >= 2
    assert_holds(model, checkpoint)
    assert len(files(tmp_path)) == 1


def test_checkpoint_that_changes_meanwhile(tmp_path: Path) -> None:
    """Its old fingerprint must not name its new weights."""
    path = write_gguf(tiny_model(seed=1), tmp_path / "tiny.gguf", quant="Q8_0")
    other = write_gguf(tiny_model(seed=2), tmp_path / "other.gguf", quant="Q8_0")

    def replace(done: int, total: int) -> None:
        if other.exists():
            other.replace(path)

    with pytest.raises(CheckpointError, match="changed while its weights were packed"):
        open_packed(open_checkpoint(path), tmp_path, on_progress=replace)
    assert files(tmp_path) == []
    assert_holds(open_packed(open_checkpoint(path), tmp_path), open_checkpoint(path))


def test_checkpoint_that_is_cut_short_meanwhile(tmp_path: Path) -> None:
    path = write_gguf(tiny_model(), tmp_path / "tiny.gguf", quant="Q8_0")

    def cut(done: int, total: int) -> None:
        os.truncate(path, path.stat().st_size // 2)

    with pytest.raises(CheckpointError, match="cut short while in use"):
        open_packed(open_checkpoint(path), tmp_path, on_progress=cut)
    assert files(tmp_path) == []


def test_old_files_go(tmp_path: Path, checkpoint: Checkpoint) -> None:
    open_packed(checkpoint, tmp_path)
    path = the_file(tmp_path)
    fingerprint = path.name.partition("-")[0]
    folder = path.parent
    path.unlink()
    outdated = [f"{fingerprint}-v0.baton", f"{fingerprint}-v0-int8.baton", f"{fingerprint}-v99.baton"]
    others = [f"{'0' * 63}{i}-v0.baton" for i in range(packed_folder.MAX_FILES + 2)]
    for age, name in enumerate([*outdated, *others, f"{path.name}.abandoned.tmp"]):
        (folder / name).write_bytes(b"x")
        os.utime(folder / name, (1e9 - age, 1e9 - age))
    open_packed(checkpoint, tmp_path)
    assert files(tmp_path) == sorted([path.name, *others[: packed_folder.MAX_FILES - 1]])


class CorruptingFile(io.FileIO):
    """A disk that loses a bit of what it was given, somewhere in the weights."""

    def write(self, content: Any) -> int:
        damaged = bytearray(content)
        if self.tell() >= 4096 and len(damaged) > 1000:
            damaged[len(damaged) // 2] ^= 4
        return super().write(damaged)


def test_what_was_written_is_compared(tmp_path: Path, checkpoint: Checkpoint) -> None:
    with (
        CorruptingFile(tmp_path / "file", "w+") as file,
        pytest.raises(PackedFileError, match=r"come back, in 'embed\.weight'"),
    ):
        write_packed(file, checkpoint_recipe(checkpoint))


def test_pack_source(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_hf(tiny_model("qwen2"), tmp_path / "tiny"))
    assert_holds(pack_source(checkpoint), checkpoint)
    names = [name for name in checkpoint.tensor_names if len(checkpoint.stored(name).shape) == 2]
    formats = dict(zip(names, [*Format, *Format], strict=False))
    model = pack_source(checkpoint, formats)
    assert {matrix.format for matrix in model.matrices.values()} == set(Format)
    for name, matrix in model.matrices.items():
        assert matrix.format is formats.get(name, Format.F32)
        largest = np.abs(checkpoint.tensor(name)).max()
        np.testing.assert_allclose(unpack(matrix), checkpoint.tensor(name), atol=largest / 14)


def test_pack_source_refuses(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_hf(tiny_model(intermediate_size=80), tmp_path / "tiny"))
    with pytest.raises(ValueError, match="Q8_F16 cannot hold rows of 80 weights"):
        pack_source(checkpoint, {"layers.1.down.weight": Format.Q8_F16})

    class Wrong:
        config = checkpoint.config

        def tensor(self, name: str) -> Any:
            return checkpoint.tensor(name)[:-1]

    with pytest.raises(ValueError, match=r"'embed\.weight' has shape \[319, 64\], not \[320, 64\]"):
        pack_source(Wrong())


@pytest.mark.model
def test_embedded_model(tmp_path: Path) -> None:
    """All weights of the shipped Q4_1 file, in about the memory that they take in it."""
    checkpoint = open_checkpoint(resolve_model("smollm2"))
    model = open_packed(checkpoint, tmp_path)
    assert_holds(model, checkpoint)
    assert model.num_bytes < 1.05 * checkpoint.path.stat().st_size
