"""`baton cache verify`: what is damaged, and what only cannot be read."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from libs.service.config import Settings
from libs.store.interface import ObjectDamaged, ObjectGone, Piece, StoreError
from services.cli import store_tools
from tests.store_rig import MemoryStore, make_chain

ARGUMENTS = argparse.Namespace(delete=True, as_json=False)


class Faulty(MemoryStore):
    def __init__(self, fault: StoreError) -> None:
        super().__init__()
        self.fault = fault

    def read(self, key: str, pieces: list[Piece]) -> None:  # type: ignore[override]
        raise self.fault


@pytest.mark.parametrize(
    ("fault", "stays"),
    [
        (ObjectDamaged("k", "short", "it ends too early"), False),
        (ObjectGone("no such object"), True),
        (StoreError("connection refused"), True),
    ],
)
def test_only_damaged_objects_are_deleted(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fault: StoreError, stays: bool
) -> None:
    store = Faulty(fault)
    stored = make_chain(1, 2).write(store)
    monkeypatch.setattr(store_tools, "open_store", lambda url: store)
    if type(fault) is StoreError:
        with pytest.raises(StoreError, match="refused"):
            store_tools.run_verify(ARGUMENTS, Settings(state_dir=tmp_path))
    else:
        assert store_tools.run_verify(ARGUMENTS, Settings(state_dir=tmp_path)) == 0
    assert (stored.key in store.objects) == stays
