"""The HTTP side: routes, and errors that are JSON whatever went wrong."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from typing import Final

import msgspec
from aiohttp import web

from libs.service.logs import get_logger
from libs.service.release import release
from libs.wire.errors import BatonError
from services.gateway.access import OPEN_PATHS, Caller
from services.gateway.answering import CHAT, COMPLETIONS, MESSAGES, Endpoint
from services.gateway.api import openapi
from services.gateway.api.errors import ApiError, from_failure, model_not_found, unexpected
from services.gateway.api.messages import ModelInfo, ModelPage, error_body
from services.gateway.api.responses import ModelCard, ModelList
from services.gateway.exchange import Exchange, public_id
from services.gateway.gateway import Gateway
from services.gateway.metrics import CONTENT_TYPE
from services.gateway.sse import ClientGone

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
_REQUEST_ID: Final = web.RequestKey("request_id", str)
_CALLER: Final = web.RequestKey("caller", Caller)
_EXCHANGE: Final = web.RequestKey("exchange", Exchange)
_CLIENT_GONE: Final = 499
CLOSE_TIMEOUT_S: Final = 1.0
KEEPALIVE_TIMEOUT_S: Final = 75.0
log = get_logger()


def build_app(gateway: Gateway) -> web.Application:
    """Every route of the gateway. The caller starts and closes `gateway`."""
    routes = Routes(gateway)
    app = web.Application(client_max_size=gateway.settings.max_body_bytes, middlewares=[routes.guard])
    app.on_response_prepare.append(_add_headers)
    app.router.add_post("/v1/chat/completions", routes.answer(CHAT))
    app.router.add_post("/v1/completions", routes.answer(COMPLETIONS))
    app.router.add_post("/v1/messages", routes.answer(MESSAGES))
    app.router.add_post("/v1/messages/count_tokens", routes.computed(gateway.counting.count))
    app.router.add_post("/tokenize", routes.computed(gateway.counting.tokenize))
    app.router.add_post("/detokenize", routes.computed(gateway.counting.detokenize))
    app.router.add_get("/v1/models", routes.models)
    app.router.add_get("/v1/models/{model:.+}", routes.model)
    app.router.add_get("/health", routes.health)
    app.router.add_get("/ready", routes.ready)
    app.router.add_get("/metrics", routes.metrics)
    app.router.add_get("/openapi.json", routes.openapi)
    return app


def make_runner(gateway: Gateway) -> web.AppRunner:
    """The server around `build_app`."""
    return web.AppRunner(
        build_app(gateway),
        handler_cancellation=True,  # a client that goes away cancels its handler, which aborts the workers
        access_log=None,
        keepalive_timeout=KEEPALIVE_TIMEOUT_S,
        shutdown_timeout=CLOSE_TIMEOUT_S,
    )


async def listen(
    runner: web.AppRunner,
    host: str,
    port: int,
    *,
    fd: int | None = None,
    tls: ssl.SSLContext | None = None,
) -> str:
    """Opens the port, or takes `fd`, a socket that listens; returns the address under which it is reached.

    Raises OSError when the port is taken, or `fd` is no socket.
    """
    await runner.setup()
    if fd is not None:
        await web.SockSite(runner, socket.socket(fileno=fd), ssl_context=tls).start()
    else:
        await web.TCPSite(runner, host, port, ssl_context=tls).start()
    name, number = runner.addresses[0][:2]
    scheme = "http" if tls is None else "https"
    return f"{scheme}://[{name}]:{number}" if ":" in name else f"{scheme}://{name}:{number}"


async def stop_listening(runner: web.AppRunner) -> None:
    """No new connections; idle ones are closed, the others when their answer is out."""
    for site in list(runner.sites):
        await site.stop()
    if runner.server is not None:
        runner.server.pre_shutdown()


class Routes:
    """Handlers, all methods so that the gateway is an argument and no global."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._created = time.time_ns() // 1_000_000_000

    def answer(self, endpoint: Endpoint) -> Handler:
        gateway = self._gateway

        async def handle(request: web.Request) -> web.StreamResponse:
            exchange = Exchange(
                request, request[_REQUEST_ID], endpoint.operation, gateway.telemetry, gateway.metrics
            )
            request[_EXCHANGE] = exchange
            caller = request[_CALLER]
            with exchange, caller.use():
                exchange.called_by(caller.key_id)
                try:
                    return await gateway.answering.handle(request, exchange, endpoint, caller.tenant)
                finally:
                    caller.charge(exchange.num_tokens)

        return handle

    def computed(self, compute: Callable[[web.Request], Awaitable[bytes]]) -> Handler:
        """An answer in JSON that needs no worker."""

        async def handle(request: web.Request) -> web.StreamResponse:
            return _json(await compute(request))

        return handle

    async def models(self, request: web.Request) -> web.Response:
        if _speaks_anthropic(request):
            model = self._info()
            return _json(msgspec.json.encode(ModelPage(data=(model,), first_id=model.id, last_id=model.id)))
        return _json(msgspec.json.encode(ModelList(data=(self._card(),))))

    async def model(self, request: web.Request) -> web.Response:
        card = self._card()
        if request.match_info["model"] != card.id:
            raise model_not_found(request.match_info["model"])
        return _json(msgspec.json.encode(self._info() if _speaks_anthropic(request) else card))

    async def health(self, request: web.Request) -> web.Response:
        """Alive: the event loop runs. Says nothing about workers."""
        return web.json_response({"status": "alive"})

    async def ready(self, request: web.Request) -> web.Response:
        reasons = self._gateway.not_ready()
        if reasons:
            return web.json_response({"status": "not ready", "reasons": reasons}, status=503)
        return web.json_response({"status": "ready"})

    async def metrics(self, request: web.Request) -> web.Response:
        return web.Response(body=self._gateway.metrics.render(), headers={"Content-Type": CONTENT_TYPE})

    async def openapi(self, request: web.Request) -> web.Response:
        return _json(openapi.document(release(), self._gateway.served.name))

    def _card(self) -> ModelCard:
        served = self._gateway.served
        return ModelCard(id=served.name, created=self._created, max_model_len=served.context_length())

    def _info(self) -> ModelInfo:
        created = datetime.fromtimestamp(self._created, UTC).isoformat().replace("+00:00", "Z")
        return ModelInfo(
            id=self._gateway.served.name, display_name=self._gateway.served.name, created_at=created
        )

    @web.middleware
    async def guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        """Errors as JSON, and every request counted under its route's pattern."""
        request[_REQUEST_ID] = public_id(request)
        status = _CLIENT_GONE
        try:
            response = await self._answered(request, handler)
            status = response.status
            return response
        finally:
            resource = request.match_info.route.resource
            self._gateway.metrics.http(resource.canonical if resource is not None else "other", status)

    async def _answered(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        request_id = request[_REQUEST_ID]
        try:
            if request.path not in OPEN_PATHS:
                request[_CALLER] = self._gateway.access.caller(request.headers)
            return await handler(request)
        except ApiError as error:
            return _error(request, error)
        except BatonError as failure:
            return _error(request, from_failure(failure, request_id))
        except web.HTTPException as error:
            return _error(request, _http_error(request, error))
        except (ClientGone, ConnectionError):
            return web.Response(status=_CLIENT_GONE)  # nobody reads it
        except Exception:
            log.exception("unexpected error", path=request.path)
            return _error(request, unexpected(request_id))


async def _add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers["Server"] = "baton"
    response.headers["x-request-id"] = response.headers["request-id"] = request[_REQUEST_ID]
    if (exchange := request.get(_EXCHANGE)) is not None:
        response.headers.update(exchange.headers)


def _http_error(request: web.Request, error: web.HTTPException) -> ApiError:
    """aiohttp's own: unknown routes, wrong methods."""
    if error.status == 404:
        return ApiError(404, f"there is no {request.method[:20]} {request.path[:200]!a}", code="unknown_url")
    if isinstance(error, web.HTTPMethodNotAllowed):
        allowed = ", ".join(sorted(error.allowed_methods))
        message = f"{request.path[:200]!a} takes {allowed}, not {error.method[:20]}"
        return ApiError(405, message, code="method_not_allowed", allow=allowed)
    return ApiError(error.status, error.reason, code="http_error")


def _speaks_anthropic(request: web.Request) -> bool:
    return request.path.startswith("/v1/messages") or "anthropic-version" in request.headers


def _error(request: web.Request, error: ApiError) -> web.Response:
    """In the words of the API that the client uses."""
    body = error_body(error, request[_REQUEST_ID]) if _speaks_anthropic(request) else error.body()
    return web.Response(
        body=body, status=error.status, content_type="application/json", headers=error.headers()
    )


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")
