"""A holder of KV blocks, in this process or in one of its own that tests may stop and kill.

python -m tests.transfer_holder TRANSPORT DIRECTORY NUM_BLOCKS    prints its PoolRef, serves until its input ends
"""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import msgspec

from libs.engine.kv.layout import KvLayout
from libs.engine.kv.pool import KvPool
from libs.transfer.interface import Exporter, Place, PoolInfo
from libs.transfer.transports import TRANSPORTS
from libs.wire.messages import PoolRef

LAYOUT = KvLayout(num_layers=2, num_kv_heads=1, head_dim=8, block_size=4)
WIDE = KvLayout(num_layers=16, num_kv_heads=8, head_dim=64, block_size=16)  # 512 KiB a block


def filled(block: int, layout: KvLayout) -> bytes:
    """What stands in a holder's block."""
    return bytes([block % 251 + 1]) * layout.block_bytes


class Holder:
    """A pool whose blocks are `filled`, exported by one transport in this process."""

    def __init__(
        self,
        transport: str,
        directory: Path,
        worker_id: str = "prefill-1",
        epoch: int = 7,
        *,
        num_blocks: int = 8,
        layout: KvLayout = LAYOUT,
        key: bytes = b"k" * 32,
    ) -> None:
        self.pool = KvPool(layout, num_blocks)
        for block in range(num_blocks):
            self.pool.blocks(block, 1)[:] = filled(block, layout)
        info = PoolInfo(worker_id, epoch, layout.fingerprint, num_blocks, self.pool.num_bytes)
        place = Place(directory, "127.0.0.1", 0)
        self.exporter: Exporter = TRANSPORTS[transport].export(self.pool, info, key, place)
        self.ref = PoolRef(
            worker_id=worker_id,
            endpoints=(self.exporter.endpoint,),
            epoch=epoch,
            layout=layout.fingerprint,
            key=key,
        )

    async def close(self) -> None:
        await self.exporter.close()
        self.pool.close()


class HolderProcess:
    """The same, `WIDE`, in another process."""

    def __init__(self, transport: str, directory: Path, num_blocks: int) -> None:
        command = [sys.executable, "-m", "tests.transfer_holder", transport, str(directory), str(num_blocks)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        self.ref = msgspec.json.decode(self._process.stdout.readline(), type=PoolRef)

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)
        if number == signal.SIGKILL:
            self._process.wait(10)

    def close(self) -> None:
        self._process.kill()
        self._process.communicate(timeout=10)


async def main(transport: str, directory: str, num_blocks: str) -> None:
    holder = Holder(transport, Path(directory), num_blocks=int(num_blocks), layout=WIDE)
    await holder.exporter.start()
    print(msgspec.json.encode(holder.ref).decode(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await holder.close()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
