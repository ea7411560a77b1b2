"""`baton bench engine`: how fast Baton's engine is on this machine, without services around it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from libs.bench.driver import Driver, blocks_needed
from libs.bench.figures import MILLISECONDS, TOKENS_PER_S, Figure, merge
from libs.bench.limits import gemm_peak, read_bandwidth
from libs.bench.machine import describe
from libs.bench.memory import resident
from libs.bench.options import BenchOptions
from libs.bench.report import Memory, Report
from libs.bench.shapes import FULL, QUICK, Shapes
from libs.bench.work import shares_of_machine, weight_bytes
from libs.checkpoint.checkpoint import Checkpoint
from libs.checkpoint.open import open_checkpoint, resolve_model
from libs.engine.build import build_runner
from libs.engine.kv.layout import KvLayout
from libs.engine.kv.pool import KvPool
from libs.engine.plan import Runner
from libs.service.config import Settings

_LIMIT_REPEATS = 5


def run(settings: Settings, options: BenchOptions) -> int:
    """Measures and prints. Raises CheckpointError for the model, BatonError where something cannot be measured."""
    report = measure(settings, options)
    print(report.to_json() if options.as_json else report.table())
    return 0


def measure(settings: Settings, options: BenchOptions) -> Report:
    """Loads the model as a worker does, and times every shape `repeats` times, shape after shape in turn."""
    threads = settings.threads or len(os.sched_getaffinity(0))
    settings = replace(settings, threads=threads)
    checkpoint = open_checkpoint(resolve_model(settings.model))
    shapes = (QUICK if options.quick else FULL).only(options.groups)
    shapes = shapes.fitting(checkpoint.config.context_length)
    with _loaded(checkpoint, settings, shapes) as (runner, pool):
        driver = Driver(
            runner,
            pool,
            vocab_size=checkpoint.config.vocab_size,
            max_step_tokens=settings.max_step_tokens,
            longest=shapes.longest,
            num_streams=shapes.num_streams,
            stream_tokens=shapes.stream_tokens,
        )
        driver.warm_up()
        limits = _limits(threads) if options.limits else []
        figures = merge(
            figure
            for repeat in range(options.repeats)
            for figure in _one_round(driver, shapes, f"{repeat + 1} of {options.repeats}")
        )
        memory = Memory(resident(), weight_bytes(checkpoint), pool.num_bytes)
        limits += _limits(threads) if options.limits else []
        found = merge(limits)
        return Report(
            engine=getattr(runner, "numerics", type(runner).__name__),
            model=checkpoint.path.name,
            threads=threads,
            max_step_tokens=settings.max_step_tokens,
            machine=describe(),
            figures=tuple(figures.values()),
            limits=tuple(found.values()),
            shares=shares_of_machine(checkpoint, pool.layout, figures, found),
            memory=memory,
        )


@contextmanager
def _loaded(checkpoint: Checkpoint, settings: Settings, shapes: Shapes) -> Iterator[tuple[Runner, KvPool]]:
    layout = _layout(checkpoint, settings)
    pool = KvPool(layout, blocks_needed(layout, shapes.longest, shapes.num_streams, shapes.stream_tokens))
    try:
        _say(f"loading {checkpoint.path.name}, {pool.num_bytes >> 20} MiB of KV")
        yield build_runner(checkpoint, pool, settings), pool
    finally:
        pool.close()


def _layout(checkpoint: Checkpoint, settings: Settings) -> KvLayout:
    if settings.engine == "fake":
        from libs.engine.fake import FAKE_LAYOUT

        return FAKE_LAYOUT
    config = checkpoint.config
    return KvLayout(
        config.num_layers,
        config.num_kv_heads,
        config.head_dim,
        block_size=settings.kv_block_size,
        dtype=settings.kv_dtype,
    )


def _one_round(driver: Driver, shapes: Shapes, which: str) -> Iterator[Figure]:
    """One value of each figure."""
    for prefill in shapes.prefills:
        _say(f"{which}: {prefill.label}")
        yield Figure(prefill.key, TOKENS_PER_S, (prefill.num_tokens / driver.prefill(prefill),))
    for decode in (*shapes.decodes, *shapes.streams):
        _say(f"{which}: {decode.label}")
        tokens = decode.num_streams * shapes.decode_steps
        yield Figure(decode.key, TOKENS_PER_S, (tokens / driver.decode(decode, shapes.decode_steps),))
    for cached in shapes.cached:
        _say(f"{which}: {cached.label}")
        yield Figure(cached.key, MILLISECONDS, (1e3 * driver.cached(cached),))


def _limits(threads: int) -> list[Figure]:
    """Measured before and after the rest: a machine that others share is not the same all the time."""
    _say("this machine's limits")
    return [gemm_peak(threads, _LIMIT_REPEATS), read_bandwidth(threads, _LIMIT_REPEATS)]


def _say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)
