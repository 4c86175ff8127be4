"""The list of checks: a check is one function with `@check("name")`, and nothing else has to know of it.

A check returns its detail when it passes; it raises CheckFailed, Skipped or Noted otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lpxbuild.smoke.client import ENSEMBLE, Fields, TritonClient


class CheckFailed(Exception):
    """The server does not do what it must; the text says what was wanted and what was found."""


class Skipped(Exception):
    """Cannot be checked here; the text says why."""


class Noted(Exception):
    """Neither passed nor failed; the text is what the user should know."""


@dataclass(frozen=True)
class SmokePrompt:
    """A prompt of the recipe: raw `text`, or chat `messages` ({"role", "content"} each).

    Attributes:
        expect: text that the greedy answer must hold.
    """

    text: str | None = None
    messages: Sequence[Mapping[str, str]] | None = None
    max_tokens: int = 32
    expect: str | None = None


@dataclass
class Subject:
    """What is being tested.

    Attributes:
        repository: the model repository as it lies on disk, if known.
        engine_directory: folder of the engine host's socket, if the engine can be asked.
        max_input_len, max_seq_len: limits of the engine; None where unknown.
    """

    client: TritonClient
    repository: Path | None = None
    engine_directory: Path | None = None
    max_input_len: int | None = None
    max_seq_len: int | None = None
    singles: dict[str, str] = field(default_factory=dict)

    @property
    def streaming(self) -> bool:
        """Whether the repository was built with `serve.streaming: true`."""
        return self.client.model(ENSEMBLE).decoupled

    def greedy(self, text: str, max_tokens: int, **more: Any) -> Fields:
        """A request whose answer must be the same each time, prompt left out of it."""
        optional = {"top_k": 1, "exclude_input_in_output": True, **more}
        return {"text_input": text, "max_tokens": max_tokens, **self.client.declared(ENSEMBLE, optional)}

    def single(self, text: str, max_tokens: int) -> str:
        """Greedy answer to one prompt alone, asked once per prompt."""
        key = f"{max_tokens} {text}"
        if key not in self.singles:
            self.singles[key] = self.client.text(self.greedy(text, max_tokens))
        return self.singles[key]


CheckFunction = Callable[[Subject], str]
CHECKS: dict[str, CheckFunction] = {}

# Short, because limits of a tiny model may be; different, because equal prompts would hide a mixed-up batch.
PROMPT = "The capital of France is"
OTHER_PROMPTS = ("Water boils at", "def add(a, b):", "Once upon a time there was")
UNICODE_PROMPT = "naïve café, 你好, 🙂"
ANSWER_TOKENS = 16


def check(name: str) -> Callable[[CheckFunction], CheckFunction]:
    """Register a check; they run in the order of registration."""

    def register(function: CheckFunction) -> CheckFunction:
        CHECKS[name] = function
        return function

    return register


def require(condition: bool, text: str) -> None:
    """Fail the check with `text` where the condition does not hold."""
    if not condition:
        raise CheckFailed(text)
