"""Lays the messages of a chat out as the text that a model was trained on.

The template comes with the model and is foreign code, so it runs in Jinja2's immutable sandbox,
with the settings and helpers that Hugging Face templates are written for.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache
from typing import Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from metainfer.ir.errors import MetainferError
from metainfer.runtime.tokenizer import Tokenizer

Message = Mapping[str, Any]

_ADVICE = "check the model's chat template and the roles and order of the messages"


class _TemplateRefusal(Exception):
    """What a template raises through ``raise_exception``."""


class _Generation(Extension):
    """The ``{% generation %}`` block, which marks text for training; here it is only rendered."""

    tags = {"generation"}  # noqa: RUF012  Jinja2 declares it so.

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """Return the body of the block."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> NoReturn:
    raise _TemplateRefusal(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _to_json(value: object, indent: int | None = None, **options: Any) -> str:
    """Write JSON as is: Jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


@cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, "jinja2.ext.loopcontrols"],
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _refuse
    environment.globals["strftime_now"] = _now
    return environment


@cache
def _compile(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except jinja2.TemplateSyntaxError as error:
        lines = source.splitlines()
        text = lines[error.lineno - 1] if 0 < error.lineno <= len(lines) else ""
        raise MetainferError(
            f"the chat template is malformed: {error.message}",
            text=text.strip()[:200],
            origin=f"chat template: line {error.lineno}",
            advice=_ADVICE,
        ) from error


def render_chat(
    template: str | None,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    **variables: object,
) -> str:
    """Return the text of a chat.

    Without a template the plain form is used: one line ``role: content`` for each message, then
    ``assistant:`` where an answer is to follow.

    Args:
        template: Jinja2 source, or None.
        messages: maps with "role" and "content" (and whatever else the template reads).
        add_generation_prompt: whether the model is to answer next.
        variables: further names for the template, such as bos_token or tools.

    Raises: MetainferError if a message lacks its role or the template fails.
    """
    for number, message in enumerate(messages):
        if not isinstance(message.get("role"), str):
            raise MetainferError(
                f"message {number} has no role",
                text=repr(message)[:200],
                advice='write {"role": "user", "content": "..."}',
            )
    if template is None:
        return _plain(messages, add_generation_prompt)
    compiled = _compile(template)
    try:
        return compiled.render(
            messages=messages, add_generation_prompt=add_generation_prompt, **variables
        )
    except _TemplateRefusal as error:
        raise MetainferError(
            f"the chat template refuses the messages: {error}", advice=_ADVICE
        ) from error
    # A template is a program: it can fail with any error that its expressions can.
    except Exception as error:
        raise MetainferError(
            f"the chat template fails: {type(error).__name__}: {error}", advice=_ADVICE
        ) from error


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    **variables: object,
) -> list[int]:
    """Return the ids of a chat.

    A template writes the special tokens itself; the plain form gets those of any text.
    Raises: MetainferError as render_chat.
    """
    template = tokenizer.chat_template
    names = {**tokenizer.special_tokens, **variables}
    text = render_chat(template, messages, add_generation_prompt=add_generation_prompt, **names)
    return tokenizer.encode(text, add_special=template is None)


def _plain(messages: Sequence[Message], add_generation_prompt: bool) -> str:
    lines = [f"{m['role']}: {m.get('content') or ''}\n" for m in messages]
    return "".join(lines) + ("assistant:" if add_generation_prompt else "")
