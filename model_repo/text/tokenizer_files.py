"""A tokenizer folder as Hugging Face lays it out: tokenizer.json and the small files beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from detokenizer import Vocabulary, decode


class TokenizerError(Exception):
    """The folder or the text cannot be used; the message says why."""


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def _token_text(value: Any) -> str | None:
    """Token fields are a string, or an AddedToken written as an object."""
    if isinstance(value, dict):
        value = value.get("content")
    return value if isinstance(value, str) else None


class TokenizerFolder:
    """Encoding, and the ids that a server needs; `vocabulary` decodes."""

    def __init__(self, folder: str | Path) -> None:
        from tokenizers import Tokenizer, __version__

        self.folder = Path(folder)
        path = self.folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"no tokenizer.json in {self.folder}")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for every parse error
            raise TokenizerError(f"{path} cannot be read by tokenizers {__version__}: {error}") from error
        # Padding and truncation set in the file are the trainer's, not the prompt's.
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self.vocabulary = Vocabulary.load(self.folder)
        self.config = _read(self.folder / "tokenizer_config.json")
        self.generation_config = _read(self.folder / "generation_config.json")

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of `text`; special tokens written out in the text are recognised, as by transformers."""
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    @property
    def size(self) -> int:
        """Number of token ids, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode_word(self, word: str) -> list[int]:
        """Ids of a stop word without BOS, such that decoding them gives exactly the word again."""
        ids = self.encode(word, add_special_tokens=False)
        if decode(self.vocabulary, ids, skip_special_tokens=False) == word:
            return ids
        # The tokenizer normalises the word (leading spaces, Unicode forms): spell it byte by byte.
        spelt = self.vocabulary.byte_ids(word)
        if spelt is None or decode(self.vocabulary, spelt, skip_special_tokens=False) != word:
            raise TokenizerError(f"the tokenizer cannot express the word {word!r}")
        return spelt

    def token_id(self, name: str) -> int | None:
        """Id of eos_token, pad_token … of tokenizer_config.json, or None."""
        text = _token_text(self.config.get(name))
        return None if text is None else self._tokenizer.token_to_id(text)

    @property
    def end_id(self) -> int | None:
        """The first end id: generation_config.json's, which generation heeds, else the tokenizer's eos_token."""
        value = self.generation_config.get("eos_token_id")
        if isinstance(value, list):
            value = value[0] if value else None
        return self.token_id("eos_token") if value is None else int(value)

    @property
    def pad_id(self) -> int | None:
        """generation_config.json's pad id, else the tokenizer's pad_token, else the end id."""
        value = self.generation_config.get("pad_token_id")
        if value is None:
            value = self.token_id("pad_token")
        return self.end_id if value is None else int(value)

    def special_tokens(self) -> dict[str, str]:
        """bos_token, eos_token … as texts, as chat templates want them."""
        names = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
        found = {name: _token_text(self.config.get(name)) for name in names}
        return {name: text for name, text in found.items() if text is not None}
