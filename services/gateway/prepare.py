"""From an Order to a Job: tokenise the prompt, and see that prompt and answer fit the context."""

from __future__ import annotations

import time

from opentelemetry.context import Context

from libs.service.telemetry import Telemetry
from libs.text.errors import TextError
from libs.text.model import TextModel
from libs.wire.errors import Code
from libs.wire.messages import Limits
from services.gateway.api.errors import ApiError, invalid
from services.gateway.job import Order
from services.gateway.offload import Offload


class Preparer:
    """What a model takes. Lengths in tokens."""

    def __init__(
        self, text: TextModel, offload: Offload, telemetry: Telemetry, default_max_tokens: int | None
    ) -> None:
        self._text = text
        self._offload = offload
        self._telemetry = telemetry
        self._default_max_tokens = default_max_tokens

    async def tokenize(self, order: Order, arrived_ns: int, context: Context) -> tuple[tuple[int, ...], int]:
        """The prompt's ids, and when they were there (ns since 1970).

        Raises ApiError, naming the field, for a text or conversation the model cannot take. The span covers
        all from the request's arrival, so reading and checking it too.
        """
        began_ns = time.time_ns()
        prompt = await self.encode(order)
        ended_ns = time.time_ns()
        attributes = {
            "baton.prompt_tokens": len(prompt),
            "baton.tokenize_ms": (ended_ns - began_ns) / 1e6,
        }
        self._telemetry.record("tokenize", arrived_ns, ended_ns, context, attributes)
        return prompt, ended_ns

    async def encode(self, order: Order) -> tuple[int, ...]:
        """The prompt's ids. Raises ApiError, naming the field, for a text or conversation the model cannot take."""
        try:
            return await self._offload.run(lambda: tuple(order.tokenize(self._text)), weight=order.num_chars)
        except TextError as error:
            raise invalid(order.prompt_param, error.message) from None

    def limits(self, order: Order, prompt_tokens: int, context_length: int) -> Limits:
        """Raises ApiError when the prompt, or the prompt with the answer that was asked for, is too long."""
        if prompt_tokens == 0:
            raise invalid(order.prompt_param, "holds no tokens")
        room = context_length - prompt_tokens
        wanted = order.max_tokens
        if room < (1 if wanted is None else min(wanted, 1)):
            raise _too_long(order.prompt_param, prompt_tokens, wanted, context_length)
        if wanted is None:
            wanted = min(self._default_max_tokens or room, room)
        elif wanted > room:
            raise _too_long(order.max_tokens_param, prompt_tokens, wanted, context_length)
        return self._limits(order, wanted)

    def _limits(self, order: Order, max_tokens: int) -> Limits:
        """Workers know no end token but those named here; a client's own count even where it ignores the model's."""
        for index, token_id in enumerate(order.stop_token_ids):
            if token_id >= self._text.vocab_size:
                raise invalid(f"stop_token_ids[{index}]", f"ids end at {self._text.vocab_size - 1}")
        own = () if order.ignore_eos else self._text.eos_token_ids
        return Limits(
            max_tokens=max_tokens,
            stop_token_ids=tuple(dict.fromkeys((*order.stop_token_ids, *own))),
            ignore_eos=order.ignore_eos and not order.stop_token_ids,
        )


def _too_long(param: str, prompt_tokens: int, max_tokens: int | None, context_length: int) -> ApiError:
    answer = "at least 1" if max_tokens is None else str(max_tokens)
    message = (
        f"{param}: this model's context holds {context_length} tokens, but {prompt_tokens} in the prompt "
        f"and {answer} for the answer were asked for"
    )
    return ApiError(400, message, param=param, code=str(Code.CONTEXT_LENGTH_EXCEEDED))
