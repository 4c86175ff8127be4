"""Chat messages to a prompt, with the model's own Jinja template, as transformers renders it."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox


class ChatTemplateError(Exception):
    """The messages do not fit the model; the text is the template's own where it raised one."""


class _GenerationTag(jinja2.ext.Extension):
    """{% generation %} … {% endgeneration %} marks the assistant's words for training; rendering passes it through."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


class ChatTemplate:
    """A compiled template; rendering is sandboxed, so a template from the internet cannot reach Python."""

    def __init__(
        self,
        source: str,
        special_tokens: Mapping[str, str],
        *,
        now: Callable[[], datetime.datetime] = datetime.datetime.now,
    ) -> None:
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: now().strftime(pattern)
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ChatTemplateError(f"the chat template does not parse: {error}") from error

    @classmethod
    def load(cls, folder: str | Path, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
        """From chat_template.jinja, else tokenizer_config.json (a text, or a list of named ones); None without one."""
        path = Path(folder) / "chat_template.jinja"
        if path.is_file():
            return cls(path.read_text(encoding="utf-8"), special_tokens)
        config = Path(folder) / "tokenizer_config.json"
        source = json.loads(config.read_text(encoding="utf-8")).get("chat_template") if config.is_file() else None
        if isinstance(source, list):
            named = {entry["name"]: entry["template"] for entry in source}
            source = named.get("default")
        return None if source is None else cls(source, special_tokens)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """The prompt, special tokens written out: encode it with add_special_tokens=False.

        Content given as a list of text parts is the parts joined with newlines; any other part raises.
        """
        if not messages:
            raise ChatTemplateError("messages is empty")
        plain = [_plain_message(message, position) for position, message in enumerate(messages)]
        try:
            return self._template.render(
                messages=plain,
                tools=tools,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self._special_tokens, **variables},
            )
        except jinja2.TemplateError as error:
            raise ChatTemplateError(str(error)) from error
        except (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError) as error:
            raise ChatTemplateError(f"the chat template cannot render these messages: {error}") from error


def _plain_message(message: Mapping[str, Any], position: int) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise ChatTemplateError(f"messages[{position}] has no role")
    content = message.get("content")
    if isinstance(content, (list, tuple)):
        texts = []
        for part in content:
            if isinstance(part, str):
                texts.append(part)
            elif isinstance(part, Mapping) and part.get("type") == "text" and isinstance(part.get("text"), str):
                texts.append(part["text"])
            else:
                kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
                raise ChatTemplateError(
                    f"messages[{position}] has a content part of type {kind!r}; only text is served"
                )
        content = "\n".join(texts)
    elif content is not None and not isinstance(content, str):
        raise ChatTemplateError(f"messages[{position}] has content of type {type(content).__name__}")
    return {**message, "content": content}
