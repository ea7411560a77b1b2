"""Logs: one JSON object a line on stderr, with service, instance, trace and request ids.

    {"timestamp": "...", "level": "info", "event": "...", "service": "decode", "instance": "...",
     "trace_id": "...", "span_id": "...", "request_id": "..."}

`request_id` and the like are bound with `structlog.contextvars.bind_contextvars`. The standard library's
loggers (nats, aiohttp, opentelemetry) come out the same way.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import TextIO

import orjson
import structlog
from opentelemetry import trace
from structlog.typing import EventDict, Processor, WrappedLogger

from libs.service.config import Settings

_NOISY = ("asyncio", "nats", "aiohttp.access", "urllib3", "opentelemetry")


def get_logger(name: str = "baton") -> structlog.stdlib.BoundLogger:
    """A logger with methods debug, info, warning, error, exception: an event and keyword values."""
    return structlog.stdlib.get_logger(name)


def configure(service: str, instance_id: str, settings: Settings, stream: TextIO | None = None) -> None:
    """Routes all logs of this process to `stream` (None: stderr). Called once, in a `__main__`."""
    level = logging.getLevelNamesMapping()[settings.log_level.upper()]
    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _add_trace,
        _Origin(service, instance_id),
    ]
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.PositionalArgumentsFormatter(),
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.StackInfoRenderer(),
                structlog.processors.format_exc_info,
                structlog.processors.JSONRenderer(serializer=_to_json),
            ],
        )
    )
    handler.addFilter(_Seldom("opentelemetry"))
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(level)
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(level, logging.WARNING))


class _Seldom(logging.Filter):
    """Lets each message of the loggers below `name` through once a minute: a collector that is away must not
    fill the log."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._prefix = name
        self._last_s: dict[str, float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if not record.name.startswith(self._prefix):
            return True
        key = f"{record.name}:{record.lineno}"  # few: places in the code
        if record.created - self._last_s.get(key, 0.0) < 60.0:
            return False
        self._last_s[key] = record.created
        return True


class _Origin:
    def __init__(self, service: str, instance_id: str) -> None:
        self._service = service
        self._instance_id = instance_id

    def __call__(self, logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
        event["service"] = self._service
        event["instance"] = self._instance_id
        return event


def _add_trace(logger: WrappedLogger, method: str, event: EventDict) -> EventDict:
    context = trace.get_current_span().get_span_context()
    if context.is_valid:
        event["trace_id"] = f"{context.trace_id:032x}"
        event["span_id"] = f"{context.span_id:016x}"
    return event


def _to_json(event: EventDict, **_: object) -> str:
    try:
        return orjson.dumps(event, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:  # lone surrogates, huge integers: rare, and no reason to lose the line
        text = json.dumps(event, default=repr, ensure_ascii=False, skipkeys=True)
        return text.encode("utf-8", "replace").decode()
