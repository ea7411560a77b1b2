"""`baton gateway`: HTTP in, tokens out."""

from __future__ import annotations

import asyncio
import os
import ssl
from typing import Final

from libs.checkpoint.errors import CheckpointError
from libs.checkpoint.open import open_checkpoint, resolve_model
from libs.service import logs, process
from libs.service.bus import Bus
from libs.service.config import Settings, instance_id, load
from libs.service.keys import KeyProblem
from libs.service.telemetry import Telemetry
from libs.text.errors import UnsupportedTokenizer
from libs.text.model import TextModel
from libs.wire.errors import BusError
from services.gateway.app import listen, make_runner, stop_listening
from services.gateway.gateway import Gateway, Model

EXIT_FAILED: Final = 1
EXIT_UNUSABLE: Final = 2  # a setting or a file is wrong: starting again changes nothing
log = logs.get_logger(__name__)


def main(settings: Settings) -> int:
    """Serves until SIGTERM or SIGINT, then drains. Returns the exit status."""
    gateway_id = instance_id(settings, "gateway")
    logs.configure("gateway", gateway_id, settings)

    async def run(stop: asyncio.Event) -> int:
        try:
            await serve(gateway_id, settings, stop)
        except (CheckpointError, KeyProblem, UnsupportedTokenizer, OSError) as error:
            log.error("cannot serve", error=str(error))
            return EXIT_UNUSABLE
        except BusError as error:
            log.error("cannot serve", error=str(error))
            return EXIT_FAILED
        return 0

    return process.run(run)


async def serve(gateway_id: str, settings: Settings, stop: asyncio.Event) -> None:
    """Serves until `stop`. Raises CheckpointError, UnsupportedTokenizer, KeyProblem, BusError, OSError (port taken)."""
    model = await asyncio.to_thread(load_model, settings)
    async with await Bus.connect(settings.nats_url, gateway_id) as bus:
        telemetry = Telemetry.start("gateway", gateway_id, settings)
        gateway = Gateway(gateway_id, settings, model, bus, telemetry)
        runner = make_runner(gateway)
        try:
            await gateway.start()
            await gateway.meet_workers()
            gateway.address = await listen(
                runner, settings.host, settings.port, fd=settings.listen_fd, tls=tls_of(settings)
            )
            log.info("serving", address=gateway.address, model=model.name)
            await gateway.run(stop)
            await stop_listening(runner)
            await gateway.drain()
        finally:
            await runner.cleanup()
            await gateway.close()
            await bus.drain()
            await asyncio.to_thread(telemetry.shutdown)


def tls_of(settings: Settings) -> ssl.SSLContext | None:
    """None for plain HTTP. Raises OSError (ssl.SSLError among them), naming the file, for one that is of no use."""
    if settings.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)  # TLS 1.2 or newer
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:
        raise OSError(f"tls_cert {settings.tls_cert}, tls_key {settings.tls_key}: {error}") from error
    return context


def load_model(settings: Settings) -> Model:
    """Reads everything but the weights. Raises CheckpointError or UnsupportedTokenizer."""
    checkpoint = open_checkpoint(resolve_model(settings.model))
    return Model(
        name=settings.served_name or checkpoint.config.name,
        fingerprint=checkpoint.fingerprint(settings.cache_dir / "fingerprints"),
        context_length=checkpoint.config.context_length,
        text=TextModel.from_checkpoint(checkpoint),
    )


if __name__ == "__main__":
    raise SystemExit(main(load(os.environ)))
