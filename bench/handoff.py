"""What handing a prompt from prefill to decode adds to its first token, and how long the rest of it takes.

python -m bench.handoff --prompts 20

Two Batons take turns with new prompts of 4096 tokens: one with a prefill and a decode worker, one whose decode worker
reads prompts itself. Time to first token is the client's. From the traces of the first: `handoff`, from the end of the
last chunk to the first token's being at decode, and `handoff.kv`, until all blocks were there and confirmed.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from bench.live import Up, baton_up, random_tokens
from libs.service.span_files import read_spans
from libs.wire.errors import BatonError

_SPANS_S = 5.0  # until spans are in their files


def spans_ms(up: Up, name: str, count: int) -> list[float]:
    """The last `count` of a name."""
    deadline_s = time.monotonic() + _SPANS_S
    while True:
        found = sorted(
            (span.start_ns, (span.end_ns - span.start_ns) / 1e6)
            for span in read_spans(up.folder / "traces", name.encode())
            if span.name == name
        )
        if len(found) >= count:
            return [length for _, length in found[-count:]]
        if time.monotonic() > deadline_s:
            raise BatonError(f"{len(found)} spans {name}, not {count}")
        time.sleep(0.2)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--prompt-tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    rng, options = random.Random(arguments.seed), ("--kv-cache-mib", 1024, "--store", "none")
    apart: list[float] = []
    alone: list[float] = []
    with (
        tempfile.TemporaryDirectory(prefix="baton-handoff-") as name,
        baton_up(Path(name, "apart"), arguments.threads, *options) as both,
        baton_up(Path(name, "alone"), arguments.threads, "--prefill", 0, *options) as one,
    ):
        for up in (both, one):  # links are made, memory is touched
            up.first_token_ms(random_tokens(rng, arguments.prompt_tokens))
        for _ in range(arguments.prompts):
            prompt = random_tokens(rng, arguments.prompt_tokens)
            turns = [(both, apart), (one, alone)]
            rng.shuffle(turns)
            for up, times in turns:
                times.append(up.first_token_ms(prompt)[0])
        first, blocks = (spans_ms(both, span, arguments.prompts) for span in ("handoff", "handoff.kv"))
    ratios = [a / b for a, b in zip(apart, alone, strict=True)]
    print(
        f"{arguments.prompts} prompts of {arguments.prompt_tokens} tokens, {arguments.threads} threads a worker"
    )
    print(f"  first token: {_spread(apart)} ms handed over, {_spread(alone)} ms computed by decode itself")
    print(f"  ratio of each pair: {_spread(ratios, 3)}")
    print(f"  after the last chunk: first token {_spread(first)} ms, all blocks {_spread(blocks)} ms later")
    return 0


def _spread(values: list[float], digits: int = 1) -> str:
    """Median and the middle half."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:.{digits}f} ({low:.{digits}f}..{high:.{digits}f})"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except BatonError as error:
        sys.exit(f"bench: {error.message}")
