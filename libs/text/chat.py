"""Conversations, and the chat templates that turn one into a prompt."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from libs.text.errors import TextError, UnsupportedTokenizer


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """One message. Templates see both fields; `normalise_content` makes a `content` from what clients send."""

    role: str
    content: str


def normalise_content(role: str, content: object, *, field: str = "content") -> str:
    """The text of a message's `content` as a client sent it: a string, null, or a list of parts.

    Text parts are joined with nothing between them: the prompt holds what was written and no more. Null is
    "" for the assistant, whose message may have been a tool call only. Raises TextError, naming `field`, for
    everything else.
    """
    if isinstance(content, str):
        return content
    if content is None:
        if role == "assistant":
            return ""
        raise TextError(f"{field} is missing or null; only an assistant message may have none")
    if not isinstance(content, list):
        raise TextError(f"{field} must be a string or a list of text parts")
    if not content:
        raise TextError(f"{field} is an empty list; it needs at least one text part")
    return "".join(_part_text(part, f"{field}[{index}]") for index, part in enumerate(content))


def _part_text(part: object, field: str) -> str:
    if not isinstance(part, dict):
        raise TextError(f"{field} must be an object with a type")
    kind = part.get("type")
    if kind != "text":
        raise TextError(f"{field} has type {kind!r}; this model takes text parts only")
    text = part.get("text")
    if not isinstance(text, str):
        raise TextError(f"{field}.text must be a string")
    return text


class ChatTemplate:
    """A model's own template. It runs sandboxed: it comes with a file that anybody may have written.

    Behaves as the templates' authors tested it: blocks are trimmed, `raise_exception`, `strftime_now`,
    `tojson`, loop controls and the `generation` tag exist.
    """

    def __init__(
        self,
        source: str,
        variables: Mapping[str, str],
        *,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """`variables` are names of special tokens, such as `bos_token`, with their text.

        Raises UnsupportedTokenizer where `source` is not a template.
        """
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationTag]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise UnsupportedTokenizer(f"the chat template cannot be read: {error}") from error
        self._variables = dict(variables)
        self.source = source

    def render(self, messages: Sequence[ChatMessage], *, add_generation_prompt: bool) -> str:
        """The prompt as text. Raises TextError with the template's words where it refuses the messages."""
        if not messages:
            raise TextError("messages must hold at least one message")
        try:
            return self._template.render(
                messages=[{"role": message.role, "content": message.content} for message in messages],
                add_generation_prompt=add_generation_prompt,
                tools=None,
                documents=None,
                **self._variables,
            )
        except Exception as error:  # a template is foreign code: it can raise anything, also by accident
            raise TextError(f"the model's chat template refused the messages: {error}") from error


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's text for training; what is inside counts, the mark does not."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 declares it as a plain class attribute)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own filter escapes HTML characters, which no model was trained on.
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
