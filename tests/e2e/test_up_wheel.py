"""The built wheel, with the source tree out of reach: nothing is missing from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("libs", "services")
LOAD_ALL = """
import importlib, pathlib, pkgutil, sys
import services.cli
assert pathlib.Path(services.__file__).parents[1] == pathlib.Path(sys.argv[1])
for module in pkgutil.walk_packages(services.cli.__path__, "services.cli."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder that holds what `pip install` of the wheel would put into site-packages."""
    source, wheels, site = (tmp_path_factory.mktemp(name) for name in ("source", "wheels", "site"))
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, source)
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
    done = subprocess.run(
        [*command, "--wheel-dir", str(wheels), str(source)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = wheels.glob("baton-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    shutil.rmtree(source)
    yield site


def run(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("BATON_")}
    return subprocess.run(
        [sys.executable, "-P", *arguments],
        env=env | {"PYTHONPATH": str(site)}, cwd=site.parent, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


def test_every_file_of_the_packages_is_in_it(installed: Path) -> None:
    def files(root: Path) -> set[str]:
        found = (path for name in PACKAGES for path in (root / name).rglob("*") if path.is_file())
        return {str(path.relative_to(root)) for path in found if path.suffix != ".pyc"}

    assert files(installed) == files(ROOT)


def test_the_command_runs_from_it(installed: Path) -> None:
    done = run(installed, "-c", LOAD_ALL, str(installed))
    assert done.returncode == 0, done.stderr
    done = run(installed, "-m", "services.cli", "--version")
    assert done.stdout.startswith("baton ") and "not installed" not in done.stdout
    (entry_points,) = installed.glob("baton-*.dist-info/entry_points.txt")
    assert "baton = services.cli.main:main" in entry_points.read_text()
