"""Which engine a worker gets: native kernels where they can be had, torch where not, never one in silence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from libs.checkpoint.open import open_checkpoint
from libs.engine import build
from libs.engine.build import EngineUnavailable, build_runner, choose_engine
from libs.engine.kv.layout import KvLayout
from libs.engine.kv.pool import KvPool
from libs.engine.plan import Draw, Row, StepPlan
from libs.kernels.native.library import NativeUnavailable
from libs.service.config import Settings
from libs.wire.messages import Sampling
from tests.checkpoints import tiny_model, write_gguf
from tests.native import CACHE_DIR, library

ROOT = Path(__file__).parents[2]
PLAN = StepPlan((Row("r", (5, 6, 7), 0, (0,), Draw(Sampling(temperature=0.0), (5, 6, 7), 3)),))


def settings(**changes: object) -> Settings:
    return Settings(**{"cache_dir": CACHE_DIR, "threads": 1, **changes})  # type: ignore[arg-type]


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise NativeUnavailable("no C++ compiler was found; install one")

    monkeypatch.setattr(build, "load", refuse)


def test_native_kernels_are_the_default() -> None:
    library()
    choice = choose_engine(settings())
    assert (choice.kind, choice.numerics) == ("native", "native-1")
    assert choose_engine(settings(weights="int8")).numerics == "native-1-int8"
    assert choose_engine(settings(engine="torch")).kind == "torch"
    assert choose_engine(settings(engine="fake")).numerics == "fake"


def test_without_a_compiler_torch_serves_and_says_so(no_compiler: None) -> None:
    with capture_logs() as logs:
        assert choose_engine(settings()).kind == "torch"
    assert logs[0]["log_level"] == "warning" and "torch" in logs[0]["event"]
    assert "install" in logs[0]["reason"]


@pytest.mark.parametrize("changes", [{"engine": "native"}, {"kernels": "avx2"}])
def test_what_was_asked_for_is_not_replaced(no_compiler: None, changes: dict[str, object]) -> None:
    with pytest.raises(EngineUnavailable, match="install one"):
        choose_engine(settings(**changes))


def test_engines_of_other_numerics_share_no_kv() -> None:
    layouts = {
        KvLayout(2, 2, 16, numerics=name).fingerprint for name in ("native-1", "native-1-int8", "torch")
    }
    assert len(layouts) == 3


@pytest.mark.parametrize("engine", ["native", "torch"])
@pytest.mark.parametrize("weights", ["native", "int8"])
def test_a_file_is_served_by_each(tmp_path: Path, engine: str, weights: str) -> None:
    library()
    checkpoint = open_checkpoint(write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf"))
    pool = KvPool(KvLayout(2, 2, 16), 4)
    chosen = settings(engine=engine, weights=weights, cache_dir=CACHE_DIR)
    (token,) = build_runner(checkpoint, pool, chosen).execute(PLAN)
    assert token is not None and 0 <= token.id < 320
    pool.close()


def test_no_torch_is_loaded_with_native_kernels(tmp_path: Path) -> None:
    """It would cost a worker 200 MB and more than a second."""
    library()
    file = write_gguf(tiny_model("llama"), tmp_path / "tiny.gguf")
    program = f"""
import sys
from pathlib import Path
from libs.checkpoint.open import open_checkpoint
from libs.engine.build import build_runner
from libs.engine.kv.layout import KvLayout
from libs.engine.kv.pool import KvPool
from libs.service.config import Settings
import libs.worker.process, services.prefill.__main__, services.decode.__main__
pool = KvPool(KvLayout(2, 2, 16), 4)
build_runner(open_checkpoint(Path({str(file)!r})), pool, Settings(cache_dir=Path({str(CACHE_DIR)!r})))
assert "torch" not in sys.modules
"""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, env=env)
