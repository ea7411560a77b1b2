"""The bytes of a KV pool: one anonymous shared-memory file, mapped by its owner and by every peer that pulls."""

from __future__ import annotations

import contextlib
import mmap
import os

from libs.engine.kv.layout import KvLayout

_MADV_POPULATE_WRITE = 23  # linux/mman.h; the mmap module does not name it


class KvPool:
    """`num_blocks` blocks of `layout`, zeroed. `fd` is what a peer on this host maps.

    Holds bytes only: which block belongs to whom is `KvCache`'s business.
    """

    def __init__(self, layout: KvLayout, num_blocks: int) -> None:
        self.layout = layout
        self.num_blocks = num_blocks
        self.num_bytes = layout.block_bytes * num_blocks
        self.fd = os.memfd_create("baton-kv", os.MFD_CLOEXEC)
        os.ftruncate(self.fd, self.num_bytes)
        self.map = mmap.mmap(self.fd, self.num_bytes, mmap.MAP_SHARED)
        with contextlib.suppress(OSError):  # kernels without shared huge pages
            self.map.madvise(mmap.MADV_HUGEPAGE)
        self.view = memoryview(self.map)

    def blocks(self, first: int, count: int) -> memoryview:
        """The bytes of `count` blocks from block `first` on. Raises IndexError outside the pool."""
        if first < 0 or count < 0 or first + count > self.num_blocks:
            raise IndexError(f"blocks {first} to {first + count - 1} of a pool of {self.num_blocks}")
        size = self.layout.block_bytes
        return self.view[first * size : (first + count) * size]

    def populate(self, start: int, num_bytes: int) -> None:
        """Makes this part present, without changing a byte of it. `start`: as `blocks` begin, rounded down to a page.

        Raises OSError where the system cannot (Linux before 5.14), or has no memory.
        """
        first = start // mmap.PAGESIZE * mmap.PAGESIZE
        self.map.madvise(_MADV_POPULATE_WRITE, first, start + num_bytes - first)

    def close(self) -> None:
        """Gives the file back; the mapping goes once no tensor uses it any more. Idempotent."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            with contextlib.suppress(BufferError):  # a thread, or a tensor, has it
                self.view.release()
                self.map.close()
