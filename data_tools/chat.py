"""Chats as text: a tokenizer's chat template, and which of its letters are control tokens and which what someone said.

The template is a program of the tokenizer's author and runs in a sandbox. What it writes itself, such as
`<|im_start|>`, becomes control tokens; the same letters in a message stay text. To tell them apart, a character that
the chat does not hold is put into such letters before the template runs and taken out afterwards.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from refusion_train.errors import ConfigError

# A noncharacter of Unicode: no text should hold it.
_MARK = "\ufdd0"


class ChatTemplate:
    """`source`: of the template (Jinja); `control`: content to id of the control tokens that it may write."""

    def __init__(self, source: str, control: dict[str, int], special: dict[str, str]):
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the tokenizer's chat template cannot be read: {error}") from None
        self._errors = (TemplateError, TypeError, KeyError, AttributeError, IndexError)
        self._control = control
        self._names = {f"{name}_token": piece for name, piece in special.items()}
        pieces = sorted(control, key=len, reverse=True)
        self._split = re.compile("(" + "|".join(map(re.escape, pieces)) + ")" if pieces else r"(?!)()")

    def render(self, messages: Any) -> tuple[str, str]:
        """Prompt and response of a chat whose last message is the answer to learn: all before that answer as the
        template writes it when an answer is asked for, and the rest. Marks stand where text looks like control tokens.

        Raises ValueError saying why a chat cannot be used.
        """
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise ValueError("not a list of messages (objects with role and content)")
        if not messages or messages[-1].get("role") != "assistant":
            raise ValueError("the last message is not of the role assistant, so there is nothing to learn")
        if _MARK in json.dumps(messages, ensure_ascii=False, default=str):
            raise ValueError(f"it holds U+{ord(_MARK):04X}, which is no character")
        marked = self._marked(messages)
        whole, prompt = self._text(marked, False), self._text(marked[:-1], True)
        if not whole.startswith(prompt):
            raise ValueError("the chat template writes the prompt in another way when the answer is there")
        return prompt, whole[len(prompt) :]

    def parts(self, text: str) -> Iterator[str | int]:
        """Texts and ids of control tokens of what `render` gave, in order."""
        for place, part in enumerate(self._split.split(text)):
            if place % 2:
                yield self._control[part]
            elif part:
                yield part.replace(_MARK, "")

    def _text(self, messages: list[Any], ask: bool) -> str:
        try:
            return self._template.render(messages=messages, add_generation_prompt=ask, tools=None, **self._names)
        except self._errors as error:
            raise ValueError(f"the chat template refuses it ({str(error) or type(error).__name__})") from None

    def _marked(self, value: Any) -> Any:
        """The same with a mark behind the first character of all that looks like a control token."""
        if isinstance(value, str):
            return self._split.sub(lambda found: found[0][:1] + _MARK + found[0][1:], value)
        if isinstance(value, list):
            return [self._marked(entry) for entry in value]
        if isinstance(value, dict):
            return {name: self._marked(entry) for name, entry in value.items()}
        return value


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(message: str) -> None:
    raise TypeError(message)
