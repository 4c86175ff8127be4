"""What is run through both models: a text in pieces that fit the engine, and prompts."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from lpxbuild.errors import SourceError

BUILTIN = "builtin"
LONGEST = 512
"""Tokens of a piece, where the engine's max_seq_len allows so many."""


@dataclass(frozen=True)
class Texts:
    """Token ids.

    Attributes:
        sequences: pieces of the text, each beginning with the tokenizer's first special token, if it adds one.
        prompts: (text, ids).
        name: `builtin` or the file, with the text's SHA-256.
    """

    sequences: tuple[list[int], ...]
    prompts: tuple[tuple[str, list[int]], ...]
    name: str

    @property
    def tokens(self) -> int:
        return sum(map(len, self.sequences))


def check_text(text: str, base: Path) -> str:
    """The text itself.

    Raises:
        SourceError: there is no such file, or it is empty or no UTF-8.
    """
    if text == BUILTIN:
        return (resources.files("lpxbuild.verify") / "builtin.txt").read_text(encoding="utf-8")
    path = base / Path(text).expanduser()
    try:
        found = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise SourceError(
            f"verify.text {path} cannot be read", why=str(error), next="set verify.text to builtin or to a .txt file"
        ) from error
    if not found.strip():
        raise SourceError(f"verify.text {path} is empty", next="set verify.text to builtin or to a .txt file")
    return found


def tokenized(tokenizer: Any, settings: Any, base: Path, *, longest: int) -> Texts:
    """The recipe's `verify.text` and `verify.prompts`.

    Args:
        tokenizer: of the `tokenizers` package.
        longest: tokens that the engine takes at once.

    Raises:
        SourceError: as `check_text`; or the text gives fewer than two tokens.
    """
    text = check_text(settings.text, base)
    first = tokenizer.encode("").ids[:1]
    # A book need not be tokenized to its end.
    ids = tokenizer.encode(text[: 64 * settings.tokens], add_special_tokens=False).ids[: settings.tokens]
    if len(ids) < 2:
        raise SourceError("verify.text gives fewer than two tokens", next="give a longer text in verify.text")
    size = min(LONGEST, longest) - len(first)
    pieces = [ids[begin : begin + size] for begin in range(0, len(ids), size)]
    if len(pieces) > 1 and len(pieces[-1]) < 2:
        pieces.pop()
    prompts = [(prompt, tokenizer.encode(prompt).ids[: longest - 1]) for prompt in settings.prompts]
    return Texts(
        tuple([*first, *piece] for piece in pieces),
        tuple((prompt, found) for prompt, found in prompts if found),
        f"{settings.text} (SHA-256 {hashlib.sha256(text.encode()).hexdigest()[:12]})",
    )
