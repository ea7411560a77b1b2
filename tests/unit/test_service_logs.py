"""Logs are JSON lines that say where they come from and to which request they belong."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from opentelemetry.context import attach, detach

from libs.service import logs
from libs.service.config import Settings
from libs.service.telemetry import extract

TRACE_ID, SPAN_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


class Output(io.StringIO):
    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.getvalue().splitlines()]

    def line(self) -> dict[str, Any]:
        (line,) = self.lines()
        return line


@pytest.fixture
def output() -> Iterator[Output]:
    """Logs of level info, configured as a service does; all as before afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    stream = Output()
    logs.configure("decode", "decode-1", Settings(log_level="info"), stream)
    yield stream
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    root.handlers = handlers
    root.setLevel(level)


def test_a_line(output: Output) -> None:
    logs.get_logger("libs.x").info("pulled", num_blocks=3, path="\x1b[31m\n")
    line = output.line()
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "pulled",
        "level": "info",
        "logger": "libs.x",
        "service": "decode",
        "instance": "decode-1",
        "num_blocks": 3,
        "path": "\x1b[31m\n",
    }
    assert "\x1b" not in output.getvalue()


def test_ids_of_the_request(output: Output) -> None:
    structlog.contextvars.bind_contextvars(request_id="r1")
    token = attach(extract({"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-03"}))
    logs.get_logger().info("in")
    logging.getLogger("libs.y").info("in, %s", "too")
    detach(token)
    structlog.contextvars.clear_contextvars()
    logs.get_logger().info("out")
    first, second, third = output.lines()
    for line in (first, second):
        assert (line["trace_id"], line["span_id"], line["request_id"]) == (TRACE_ID, SPAN_ID, "r1")
    assert second["event"] == "in, too"
    assert not {"trace_id", "span_id", "request_id"} & third.keys()


def test_the_standard_librarys_loggers_come_out_the_same_way(output: Output) -> None:
    logging.getLogger("nats.aio.client").error("it broke: %d", 5)
    line = output.line()
    assert (line["event"], line["level"], line["logger"]) == ("it broke: 5", "error", "nats.aio.client")
    assert (line["service"], line["instance"]) == ("decode", "decode-1")


@pytest.mark.parametrize("foreign", [True, False])
def test_an_exception_is_one_line(output: Output, foreign: bool) -> None:
    try:
        raise ValueError("bad\nthing")
    except ValueError:
        if foreign:
            logging.getLogger("libs.z").exception("failed")
        else:
            logs.get_logger().exception("failed")
    line = output.line()
    assert line["level"] == "error"
    assert "ValueError: bad\nthing" in line["exception"]
    assert "Traceback" in line["exception"]


def test_levels(output: Output) -> None:
    logs.get_logger().debug("no")
    logging.getLogger("libs.z").debug("no")
    logging.getLogger("aiohttp.access").info("no")  # our own middleware says what is worth saying
    logs.get_logger().warning("yes")
    assert output.line()["event"] == "yes"


def test_values_that_json_does_not_know(output: Output) -> None:
    logs.get_logger().info("x", value=object, data=b"\xff", surrogate="\ud800", keys={1: 2})
    assert output.line()["event"] == "x"


def test_a_collector_that_is_away_does_not_fill_the_log(output: Output) -> None:
    for number in range(100):
        logging.getLogger("opentelemetry.exporter").warning("cannot export, attempt %d", number)
        logging.getLogger("libs.z").warning("other")
    events = [line["event"] for line in output.lines()]
    assert events.count("other") == 100
    assert len(events) == 101
