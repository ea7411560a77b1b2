"""Chains of blocks to store, and a store in memory that fails when told.

chain = make_chain(seed=1, count=3)
stored = chain.write(store)
assert chain.read(store, stored.key) == chain.data
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

from libs.engine.kv.layout import KvLayout
from libs.engine.kv.names import block_names, root_name
from libs.store.interface import ObjectDamaged, ObjectGone, Piece, Store, StoredObject, StoreError
from libs.store.key import is_key
from libs.store.objects import BlockRecord, ObjectFormat, read_blocks, write_object

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=4)  # 256 bytes a block
FORMAT = ObjectFormat("model-a", LAYOUT)


@dataclass(frozen=True)
class Chain:
    """Consecutive blocks with random tokens and bytes."""

    format: ObjectFormat
    tenant: str
    parent: bytes
    records: tuple[BlockRecord, ...]
    data: list[bytes]

    @property
    def key(self) -> str:
        return self.format.key(self.tenant, self.parent, self.records).path()

    def of(self, format: ObjectFormat) -> Self:
        """The same names and tokens as another model or layout would write them."""
        data = [bytes(format.layout.block_bytes) for _ in self.data]
        return replace(self, format=format, data=data)

    def write(self, store: Store) -> StoredObject:
        views = [memoryview(data) for data in self.data]
        return write_object(store, self.format, self.tenant, self.parent, self.records, views)

    def read(self, store: Store, key: str, first: int = 0, count: int | None = None) -> list[bytes]:
        """Bytes of the blocks, checked by `read_blocks`; by default of all from `first` on."""
        records = self.records[first:][:count]
        targets = [bytearray(self.format.layout.block_bytes) for _ in records]
        read_blocks(store, self.format, key, first, records, [memoryview(target) for target in targets])
        return [bytes(target) for target in targets]


def make_chain(
    seed: int, count: int, *, format: ObjectFormat = FORMAT, tenant: str = "default", behind: int = 0
) -> Chain:
    """`count` blocks of a prompt, behind its first `behind` ones."""
    rng = random.Random(seed)
    size = format.layout.block_size
    tokens = [rng.randrange(2**32) for _ in range((behind + count) * size)]
    root = root_name(format.model_fingerprint, format.layout.fingerprint, tenant)
    names = (root, *block_names(root, tokens, size))
    records = tuple(
        BlockRecord(names[index + 1], tuple(tokens[index * size : (index + 1) * size]))
        for index in range(behind, behind + count)
    )
    data = [rng.randbytes(format.layout.block_bytes) for _ in records]
    return Chain(format, tenant, names[behind], records, data)


class MemoryStore:
    """`objects` may be changed at will; `failure`, where set, is what every call raises."""

    url = "memory:"
    num_unreadable = 0

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.used_s: dict[str, float] = {}
        self.failure: StoreError | None = None
        self.num_reads = 0

    def put(self, key: str, parts: Sequence[bytes | memoryview]) -> None:
        self._check(key)
        self.objects[key] = b"".join(parts)
        self.used_s[key] = time.time()

    def read(self, key: str, pieces: Sequence[Piece]) -> None:
        self._check(key)
        self.num_reads += 1
        if key not in self.objects:
            raise ObjectGone(f"no object {key}")
        for offset, view in pieces:
            part = self.objects[key][offset : offset + view.nbytes]
            if len(part) < view.nbytes:
                raise ObjectDamaged(key, "short", "it ends too early")
            view[:] = part

    def delete(self, key: str) -> None:
        self._check(key)
        self.objects.pop(key, None)

    def list(self) -> Iterator[list[StoredObject]]:
        if self.failure:
            raise self.failure
        yield [StoredObject(key, len(data), self.used_s.get(key, 0.0)) for key, data in self.objects.items()]

    def remove_leftovers(self) -> int:
        return 0

    def touch(self, keys: Iterable[str]) -> None:
        self.used_s.update({key: time.time() for key in keys if key in self.objects})

    def close(self) -> None:
        pass

    def _check(self, key: str) -> None:
        if self.failure:
            raise self.failure
        if not is_key(key):
            raise StoreError(f"{key!r} is no key of an object")


def leftovers(root: Path) -> list[Path]:
    """What a FileStore did not finish."""
    return list((root / "tmp").iterdir()) if (root / "tmp").exists() else []


def fail(number: int) -> Callable[..., Any]:
    """A system call that fails with this errno, for `monkeypatch`."""

    def call(*args: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    return call
