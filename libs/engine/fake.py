"""A FAKE runner: no model. Its "KV" is the token ids themselves, and it draws from what it reads back.

A token's id and position are written into the block bytes at its place, as the first 8 bytes of its share of the
first K part and of the last V part. The next token is a hash over those bytes of all positions so far, so a
missing, stale, misplaced or half copied block changes the answer; `fake_continuation` says what it must be.
For tests and for load tests of everything but the model.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from libs.engine.kv.layout import KvLayout
from libs.engine.kv.pool import KvPool
from libs.engine.plan import Draw, Row, StepAbandoned, StepPlan, never
from libs.wire.messages import Sampling, Token

Bytes = npt.NDArray[np.uint8]
Places = npt.NDArray[np.int64]
FAKE_LAYOUT = KvLayout(num_layers=1, num_kv_heads=1, head_dim=2, block_size=16, dtype="f32")
_MARK_BYTES = 8  # id and position, 4 bytes each


@dataclass(frozen=True, slots=True)
class FakeModel:
    """What the fake answers, given what it sees.

    `script` gives the answer to whole prompts; when it is used up, and for other prompts, the hash decides.
    `avoid` are ids that the hash never gives, such as the end of the text.
    """

    vocab_size: int = 1000
    script: Mapping[tuple[int, ...], Sequence[int]] | None = None
    avoid: frozenset[int] = frozenset()

    def draw(self, marks: bytes, seen: Sequence[int], num_prompt_tokens: int, sampling: Sampling) -> Token:
        """The token that follows the ids `seen`, whose marks were read as `marks`."""
        index = len(seen) - num_prompt_tokens
        scripted = self._scripted(marks, seen, num_prompt_tokens)
        seed = sampling.seed if sampling.temperature > 0 else 0
        digest = hashlib.sha256(seed.to_bytes(8, "little") + marks).digest()
        token_id = scripted[index] if index < len(scripted) else self._pick(digest)
        if sampling.logprobs is None:
            return Token(id=token_id)
        best = -digest[8] / 64
        others = ((token_id + 1 + i) % self.vocab_size for i in range(sampling.logprobs - 1))
        top = [(token_id, best), *((other, best - 1 - i / 2) for i, other in enumerate(others))]
        return Token(id=token_id, logprob=best, top=tuple(top[: sampling.logprobs]))

    def _scripted(self, marks: bytes, seen: Sequence[int], num_prompt_tokens: int) -> Sequence[int]:
        """The answer to a prompt in the script, as long as what was read is what stands there."""
        scripted = (self.script or {}).get(tuple(seen[:num_prompt_tokens]), ())
        answer = list(seen[num_prompt_tokens:])
        follows = list(scripted[: len(answer)]) == answer and marks == _marks_read(seen)
        return scripted if follows else ()

    def _pick(self, digest: bytes) -> int:
        token_id = int.from_bytes(digest[:8], "little") % self.vocab_size
        while token_id in self.avoid:
            token_id = (token_id + 1) % self.vocab_size
        return token_id


def fake_continuation(
    prompt: Sequence[int], num_tokens: int, model: FakeModel | None = None, sampling: Sampling | None = None
) -> list[int]:
    """The first `num_tokens` ids that a FakeRunner of `model` answers `prompt` with, however it is served."""
    model, sampling = model or FakeModel(), sampling or Sampling()
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(model.draw(_marks_read(tokens), tokens, len(prompt), sampling).id)
    return tokens[len(prompt) :]


class FakeRunner:
    """Implements Runner over the bytes of `pool`; see the module for what it computes.

    Each step takes `step_delay_s` and `token_delay_s` per token. `before_step` is called first, in the engine's
    thread: it may raise (a failing step) or block (a slow one).
    """

    is_fake = True

    def __init__(
        self,
        pool: KvPool,
        model: FakeModel | None = None,
        *,
        step_delay_s: float = 0.0,
        token_delay_s: float = 0.0,
        before_step: Callable[[StepPlan], None] | None = None,
    ) -> None:
        """Raises ValueError if a head's vector of the pool has no room for a mark."""
        self.model = model or FakeModel()
        self._block_size = pool.layout.block_size
        self._step_delay_s = step_delay_s
        self._token_delay_s = token_delay_s
        self._before_step = before_step
        shape = (pool.num_blocks, *pool.layout.block_shape[:-1], self._block_size, -1)
        vectors = np.frombuffer(pool.map, np.uint8).reshape(shape)
        if vectors.shape[-1] < _MARK_BYTES:
            raise ValueError(
                f"a vector of {vectors.shape[-1]} bytes is too short for a mark of {_MARK_BYTES}"
            )
        self._first: Bytes = vectors[:, 0, 0, 0, :, :_MARK_BYTES]  # [block, token, byte]
        self._last: Bytes = vectors[:, -1, -1, -1, :, :_MARK_BYTES]

    def execute(self, plan: StepPlan, is_abandoned: Callable[[], bool] = never) -> tuple[Token | None, ...]:
        if self._before_step is not None:
            self._before_step(plan)
        delay_s = self._step_delay_s + self._token_delay_s * plan.num_tokens
        if delay_s > 0:
            time.sleep(delay_s)
        if is_abandoned():
            raise StepAbandoned
        for row in plan.rows:
            self.write(row.tokens, row.start, row.blocks)
        return tuple(None if row.draw is None else self._draw(row, row.draw) for row in plan.rows)

    def write(self, tokens: Sequence[int], start: int, blocks: Sequence[int]) -> None:
        """Writes the KV of `tokens`, at positions `start ...`, into a block table; tests use it for pulled KV."""
        places = self._places(blocks, start, start + len(tokens))
        self._first[places] = self._last[places] = _marks(tokens, start)

    def _draw(self, row: Row, draw: Draw) -> Token:
        places = self._places(row.blocks, 0, row.end)
        marks = np.stack([self._first[places], self._last[places]], axis=1)
        seen = marks[:, 0, :4].copy().view("<u4")[:, 0].tolist()
        return self.model.draw(marks.tobytes(), seen, draw.num_prompt_tokens, draw.sampling)

    def _places(self, blocks: Sequence[int], start: int, end: int) -> tuple[Places, Places]:
        """Block id and place in it of the positions `start ... end`."""
        positions = np.arange(start, end, dtype=np.int64)
        return np.array(blocks, np.int64)[positions // self._block_size], positions % self._block_size


def _marks(ids: Sequence[int], start: int) -> Bytes:
    """[token, 8 bytes]: each id with its position, little endian."""
    positions = np.arange(start, start + len(ids), dtype="<u4")
    return np.stack([np.array(ids, "<u4"), positions], axis=1).view(np.uint8)


def _marks_read(ids: Sequence[int]) -> bytes:
    """What a draw reads of intact KV: both marks of each token."""
    return np.repeat(_marks(ids, 0)[:, None, :], 2, axis=1).tobytes()
