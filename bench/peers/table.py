"""A comparison as markdown, for the README."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from bench.peers.comparison import BATON, VLLM, Comparison
from bench.peers.targets import MOST_MEMORY_RATIO
from libs.bench.figures import Figure, number, spread
from libs.bench.report import LIMIT_LABELS
from libs.bench.shapes import LABELS

_MIB = 1 << 20


def markdown(comparison: Comparison) -> str:
    """One table of engines, one of the machine, the machine itself and the command."""
    return "\n".join(_lines(comparison)) + "\n"


def _lines(comparison: Comparison) -> Iterator[str]:
    yield f"`{comparison.command}`"
    yield ""
    yield f"{comparison.machine.line()}. Medians, least and most in brackets; engines took turns."
    yield ""
    yield from _engines(comparison)
    yield ""
    yield from _against_machine(comparison)
    if comparison.quality:
        yield ""
        yield from _quality(comparison)
    missed = _missed(comparison)
    yield ""
    yield f"Missed: {', '.join(missed)}." if missed else "No target that was measured was missed."
    for note in (*comparison.notes, *comparison.failures):
        yield f"\n{note}"


def _missed(comparison: Comparison) -> list[str]:
    missed = [f"{LABELS[target.key]} against {target.against}" for target in comparison.missed()]
    if comparison.memory and comparison.memory["ratio"] > MOST_MEMORY_RATIO:
        missed.append("resident memory")
    if comparison.quality and not comparison.quality["met"]:
        missed.append("quality")
    return missed


def _engines(comparison: Comparison) -> Iterator[str]:
    engines = [name for name, figures in comparison.figures.items() if figures]
    engines.sort(key=lambda name: name != BATON)
    against_vllm = VLLM in engines
    header = ["", "unit", *engines, "against Q4_1", "against llama.cpp's best"]
    yield _row([*header, *(["against vLLM"] if against_vllm else [])])
    yield _row(["---"] * (len(header) + against_vllm))
    for key in comparison.lines():
        found = {name: comparison.figures[name].get(key) for name in engines}
        unit = next(figure.unit for figure in found.values() if figure is not None)
        cells = [LABELS.get(key, key), unit, *(_cell(found[name]) for name in engines)]
        cells += [comparison.verdict(key, "q4_1"), comparison.verdict(key, "best")]
        yield _row([*cells, *([comparison.verdict(key, "vllm")] if against_vllm else [])])


def _against_machine(comparison: Comparison) -> Iterator[str]:
    yield _row(["against the machine", ""])
    yield _row(["---", "---"])
    for limit in comparison.limits.values():
        yield _row([LIMIT_LABELS.get(limit.key, limit.key), f"{spread(limit)} {limit.unit}"])
    for key, share in comparison.shares.items():
        what = "operations at the product's rate" if key.startswith("prefill") else "bytes at reading's rate"
        times = f"{number(share.least_ms)} ms / {number(share.actual_ms)} measured"
        yield _row([f"{LABELS[key]}: {what}", f"{times}: {comparison.verdict(key, 'machine')}"])
    if comparison.memory:
        yield _row(["resident memory of prefill + decode / (weights + KV pools)", _memory(comparison)])


def _memory(comparison: Comparison) -> str:
    memory = comparison.memory
    sizes = (
        f"{memory['resident_bytes'] / _MIB:.0f} MiB, weights {memory['weight_bytes'] / _MIB:.0f}, "
        f"two pools of {memory['kv_pool_bytes'] / _MIB:.0f}"
    )
    met = memory["ratio"] <= MOST_MEMORY_RATIO
    ratio = f"{memory['ratio']:.2f}" if met else f"**{memory['ratio']:.2f}, missed**"
    return f"{ratio} (target {MOST_MEMORY_RATIO:g} at most); {sizes}"


def _quality(comparison: Comparison) -> Iterator[str]:
    quality = comparison.quality
    yield _row(["mean KL divergence to float32 `transformers`, nats", ""])
    yield _row(["---", "---"])
    for name, found in quality["engines"].items():
        yield _row([name, f"{found['mean']:.5f} ± {found['error']:.5f}"])
    yield _row(["no worse than llama.cpp on the same file", "yes" if quality["met"] else "**no, missed**"])


def _cell(figure: Figure | None) -> str:
    return "" if figure is None else spread(figure)


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
