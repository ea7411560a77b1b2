"""`baton bench engine`, with the fake engine: every part but the arithmetic."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from libs.bench.machine import describe
from services.cli.main import build_parser, main
from tests.checkpoints import tiny_model, write_gguf

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(tiny_model(), tmp_path_factory.mktemp("bench") / "tiny.gguf")


def bench(model: Path, *more: str) -> int:
    return main(
        ["bench", "engine", "--engine", "fake", "--model", str(model), "--no-limits", "--quick", *more]
    )


def test_json_has_every_shape_with_all_its_values(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(model, "--json", "--repeats", "2", "--threads", "1") == 0
    captured = capsys.readouterr()
    document = json.loads(captured.out)
    figures = {figure["key"]: figure for figure in document["figures"]}
    assert list(figures) == ["prefill-128", "decode-1x64", "decode-4x64", "cached-128+16"]
    for figure in figures.values():
        assert len(figure["values"]) == 2
        assert 0 < figure["min"] <= figure["median"] <= figure["max"]
    assert (document["model"], document["threads"], document["engine"]) == ("tiny.gguf", 1, "FakeRunner")
    assert document["memory"]["pss_bytes"] > document["memory"]["weight_bytes"] > 0
    assert "2 of 2: prefill, prompt of 128" in captured.err


def test_the_table_has_a_line_for_each_shape(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(model, "--repeats", "1", "--only", "decode", "--only", "cached") == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("decode, one stream, context 64") and "tok/s" in line for line in lines)
    assert any(line.startswith("first token, 128 cached + 16 new") and " ms" in line for line in lines)
    assert not any(line.startswith("prefill") for line in lines)


@pytest.mark.parametrize(
    "arguments",
    [("--repeats", "0"), ("--repeats", "many"), ("--only", "sleep"), ("--threads", "two")],
)
def test_what_makes_no_sense_is_refused(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        build_parser().parse_args(["bench", "engine", *arguments])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("arguments", [("bench", "--help"), ("bench", "engine", "--help")])
def test_help(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        build_parser().parse_args(arguments)
    assert "engine" in capsys.readouterr().out


def test_a_model_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(tmp_path / "none.gguf") == 2
    assert "none.gguf" in capsys.readouterr().err


def test_the_command_line_itself_loads_no_torch() -> None:
    code = "import services.cli.main as m, sys; m.build_parser(); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_what_the_machine_does_not_tell_is_unknown(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nmodel name\t: Some CPU\nflags\t\t: fpu avx2 amx_int8 sse\n")
    machine = describe(cpuinfo)
    assert (machine.cpu, machine.flags) == ("Some CPU", ("avx2", "amx_int8"))
    assert "Some CPU" in machine.line()
    assert describe(tmp_path / "none").flags == ()
