"""Objects: several consecutive blocks of one chain under a header that says what they are, and a digest of each.

    key       what a listing tells; enough to find a block, not enough to trust it
    header    full names, tokens, model and layout; `libs.store.header`
    blocks    from the next multiple of 4096 on, `block_bytes` each

Whoever reads says what it expects, and gets that or an error: a damaged, short or foreign object is never used.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from libs.engine.kv.layout import KvLayout
from libs.engine.kv.names import child_name
from libs.store import header as headers
from libs.store.header import BadHeader, Entry, Header, pack_tokens, unpack_tokens
from libs.store.interface import ObjectDamaged, Store, StoredObject
from libs.store.key import ObjectKey, block_key, namespace, namespace_digest, tenant_tag

_MAX_HEADER_BYTES: Final = (
    64 << 20
)  # 14 blocks of a million tokens; more is not a header, and no memory is given to it


@dataclass(frozen=True, slots=True)
class BlockRecord:
    """A block by name (32 bytes, `libs.engine.kv.names`) and the `block_size` tokens in it."""

    name: bytes
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ObjectFormat:
    """Objects of one model and one layout."""

    model_fingerprint: str
    layout: KvLayout

    @property
    def namespace(self) -> str:
        """First folder of all keys."""
        return namespace(self.model_fingerprint, self.layout.fingerprint)

    def block_offset(self, count: int, index: int) -> int:
        """Where block `index` begins in an object of `count` blocks."""
        start = headers.padded(headers.header_bytes(count, self.layout.block_size))
        return start + index * self.layout.block_bytes

    def object_bytes(self, count: int) -> int:
        """Of an object of `count` blocks."""
        return self.block_offset(count, count)

    def key(self, tenant: str, parent: bytes, blocks: Sequence[BlockRecord]) -> ObjectKey:
        keys = tuple(block_key(block.name) for block in blocks)
        return ObjectKey(self.namespace, tenant_tag(tenant), block_key(parent), keys)

    def header(self, parent: bytes, blocks: Sequence[BlockRecord], data: Sequence[memoryview]) -> Header:
        entries = tuple(
            Entry(block.name, pack_tokens(block.tokens), headers.digest(view))
            for block, view in zip(blocks, data, strict=True)
        )
        digest = namespace_digest(self.model_fingerprint, self.layout.fingerprint)
        return Header(digest, self.layout.block_size, self.layout.block_bytes, parent, entries)


def write_object(
    store: Store,
    format: ObjectFormat,
    tenant: str,
    parent: bytes,
    blocks: Sequence[BlockRecord],
    data: Sequence[memoryview],
) -> StoredObject:
    """Writes 1 to MAX_BLOCKS consecutive blocks; `parent`: name of the block before them, or the root name.

    `data`: `block_bytes` bytes for each, which must not change meanwhile. Raises StoreFull, StoreError; ValueError for
    arguments that make no object.
    """
    _check_sizes(format, data)
    key = format.key(tenant, parent, blocks).path()
    header = format.header(parent, blocks, data).pack()
    store.put(key, [header, *data])
    return StoredObject(key, format.object_bytes(len(blocks)), time.time())


def read_blocks(
    store: Store,
    format: ObjectFormat,
    key: str,
    first: int,
    records: Sequence[BlockRecord],
    targets: Sequence[memoryview],
) -> None:
    """Reads blocks `first ... first + len(records) - 1` of the object straight into `targets`, `block_bytes` each.

    Returns only if they are the blocks of `records`, whole and unchanged. Raises ObjectGone, ObjectDamaged, StoreError;
    the targets then hold unknown bytes. ValueError for targets of another size or number.
    """
    _check_sizes(format, targets)
    count = _check_key(key, first, records)
    raw = memoryview(bytearray(format.block_offset(count, 0)))
    offsets = (format.block_offset(count, first + index) for index in range(len(records)))
    store.read(key, [(0, raw), *zip(offsets, targets, strict=True)])
    header = _unpack(key, raw)
    _check_header(key, header, format, first, records)
    for entry, target in zip(header.entries[first:], targets, strict=False):
        _check_digest(key, entry, target)


def check_object(store: Store, key: str) -> int:
    """Reads a whole object and checks all that needs no model: header, key, names and digests. Returns its blocks.

    For `baton cache verify`. Raises ObjectGone, ObjectDamaged, StoreError.
    """
    header = read_header(store, key)
    _check_names(key, header)
    start = headers.padded(headers.header_bytes(len(header.entries), header.block_size))
    block = memoryview(bytearray(header.block_bytes))
    for index, entry in enumerate(header.entries):
        store.read(key, [(start + index * header.block_bytes, block)])
        _check_digest(key, entry, block)
    return len(header.entries)


# ------------------------------------------------------------ what is expected


def _check_sizes(format: ObjectFormat, views: Sequence[memoryview]) -> None:
    if any(view.nbytes != format.layout.block_bytes for view in views):
        sizes = sorted({view.nbytes for view in views})
        raise ValueError(f"blocks have {format.layout.block_bytes} bytes each, not {sizes}")


def _check_key(key: str, first: int, records: Sequence[BlockRecord]) -> int:
    """Number of blocks in the object, if its key has these ones from `first` on."""
    try:
        blocks = ObjectKey.parse(key).blocks
    except ValueError as error:
        raise ObjectDamaged(key, "foreign", "not a key") from error
    wanted = tuple(block_key(record.name) for record in records)
    if first < 0 or blocks[first : first + len(wanted)] != wanted:
        raise ObjectDamaged(key, "foreign", f"its key has not these {len(wanted)} blocks at {first}")
    return len(blocks)


def _check_header(
    key: str, header: Header, format: ObjectFormat, first: int, records: Sequence[BlockRecord]
) -> None:
    layout = format.layout
    if header.namespace != namespace_digest(format.model_fingerprint, layout.fingerprint):
        raise ObjectDamaged(key, "foreign", "it is of another model or layout")
    if (header.block_size, header.block_bytes) != (layout.block_size, layout.block_bytes):
        raise ObjectDamaged(key, "foreign", f"its blocks have {header.block_bytes} bytes")
    _check_listed(key, header)
    for entry, record in zip(header.entries[first:], records, strict=False):
        if (entry.name, entry.tokens) != (record.name, pack_tokens(record.tokens)):
            raise ObjectDamaged(key, "foreign", "it holds another prompt under the same key")


def _check_listed(key: str, header: Header) -> None:
    """The listing said the truth about what is in it."""
    parsed = ObjectKey.parse(key)
    names = [header.parent, *(entry.name for entry in header.entries)]
    if [block_key(name) for name in names] != [parsed.parent, *parsed.blocks]:
        raise ObjectDamaged(key, "foreign", "it holds other blocks than its key says")
    if not header.namespace.hex().startswith(parsed.namespace):
        raise ObjectDamaged(key, "foreign", "it lies among objects of another model or layout")


def _check_names(key: str, header: Header) -> None:
    """The chain is what its tokens make it."""
    _check_listed(key, header)
    parent = header.parent
    for entry in header.entries:
        if child_name(parent, unpack_tokens(entry.tokens)) != entry.name:
            raise ObjectDamaged(key, "foreign", "its tokens make other names")
        parent = entry.name


def _check_digest(key: str, entry: Entry, data: memoryview) -> None:
    if headers.digest(data) != entry.digest:
        raise ObjectDamaged(key, "checksum", f"the bytes of block {block_key(entry.name).hex()} have changed")


# ------------------------------------------------------------ headers


def read_header(store: Store, key: str) -> Header:
    """Of an object of any model: its size is known only from its start."""
    raw = memoryview(bytearray(headers.ALIGN))
    store.read(key, [(0, raw)])
    try:
        num_bytes, *_ = headers.header_sizes(raw)
    except BadHeader as error:
        raise ObjectDamaged(key, error.reason, str(error)) from error
    if num_bytes > _MAX_HEADER_BYTES:
        raise ObjectDamaged(key, "header", f"its header is to have {num_bytes} bytes")
    if num_bytes > len(raw):
        raw = memoryview(bytearray(num_bytes))
        store.read(key, [(0, raw)])
    return _unpack(key, raw)


def _unpack(key: str, raw: memoryview) -> Header:
    try:
        return Header.unpack(raw)
    except BadHeader as error:
        raise ObjectDamaged(key, error.reason, str(error)) from error
