"""A worker's pool, exported by every transport that it may use."""

from __future__ import annotations

from libs.engine.kv.pool import KvPool
from libs.service.config import Settings
from libs.service.logs import get_logger
from libs.transfer.interface import Exporter, Place, PoolInfo
from libs.transfer.tcp_frames import new_key
from libs.transfer.transports import address_towards, allowed
from libs.wire.errors import BatonError
from libs.wire.messages import PoolRef
from libs.worker.card import ModelCard
from libs.worker.report import Identity

log = get_logger()


class Exports:
    """`ref` is what peers are told. Raises BatonError where no transport can be exported at all."""

    def __init__(self, identity: Identity, settings: Settings, card: ModelCard, pool: KvPool) -> None:
        info = PoolInfo(
            worker_id=identity.worker_id,
            epoch=identity.epoch,
            layout=card.layout.fingerprint,
            num_blocks=pool.num_blocks,
            num_bytes=pool.num_bytes,
        )
        key = new_key()
        host = settings.transfer_host or address_towards(settings.nats_url)
        place = Place(settings.run_dir, host, settings.transfer_port)
        self._exporters: list[Exporter] = []
        for transport in allowed(settings.transfers):
            try:
                self._exporters.append(transport.export(pool, info, key, place))
            except OSError as error:
                log.warning("not exported", transport=transport.name, host=host, error=str(error))
        if not self._exporters:
            raise BatonError(f"the KV pool cannot be exported by any of {settings.transfers}; see the log")
        self.ref = PoolRef(
            worker_id=identity.worker_id,
            endpoints=tuple(exporter.endpoint for exporter in self._exporters),
            epoch=identity.epoch,
            layout=card.layout.fingerprint,
            key=key,
        )

    async def start(self) -> None:
        for exporter in self._exporters:
            await exporter.start()

    async def close(self) -> None:
        for exporter in self._exporters:
            await exporter.close()
