"""Token ids to text, exactly and one id at a time.

Pieces joined equal the text of the whole list: characters that span several ids are held back until they are whole,
spaces at piece starts are kept, nothing is cleaned up. Works from tokenizer.json alone: byte-level BPE (GPT-2, Qwen,
Llama 3, SmolLM2), converted SentencePiece (Replace, ByteFallback, Fuse, Strip: Llama 2, Mistral, Gemma), Metaspace.

One difference from the `tokenizers` library, on purpose: in a run of <0xNN> byte tokens that is not valid UTF-8 the
library turns every byte of the run into U+FFFD, which no stream can foresee; here, as in byte-level BPE, only the bytes
that belong to no character become one U+FFFD each maximal invalid part.
"""

from __future__ import annotations

import codecs
import json
import re
from pathlib import Path
from typing import Any

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")


class DetokenizerError(Exception):
    """tokenizer.json decodes in a way this library does not know."""


def _byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of GPT-2's byte-level BPE: printable Latin-1 stays itself, the rest moves to U+0100 and up."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + n): b for n, b in enumerate(moved)}


_ALPHABET = _byte_level_alphabet()


class Vocabulary:
    """Bytes of every token of a tokenizer, and which tokens are special. Shared by all streams of a process."""

    def __init__(self, tokenizer: dict[str, Any]) -> None:
        """`tokenizer`: the parsed tokenizer.json."""
        self._tokens: dict[int, str] = {}
        vocabulary = tokenizer["model"]["vocab"]
        entries = vocabulary.items() if isinstance(vocabulary, dict) else ((p[0], i) for i, p in enumerate(vocabulary))
        for token, index in entries:
            self._tokens[index] = token
        added = tokenizer.get("added_tokens") or []
        self._tokens.update((entry["id"], entry["content"]) for entry in added)
        self.special_ids = frozenset(entry["id"] for entry in added if entry.get("special"))
        self._byte_level = False
        self._byte_fallback = False
        self._replace: list[tuple[str, str]] = []
        self._first_dropped: str | None = None  # Metaspace: character dropped from the first token
        self.strip_left = 0
        self.strip_content = " "
        self._read_decoder(tokenizer.get("decoder"))
        self._bytes: dict[int, bytes] = {}

    @classmethod
    def load(cls, folder: str | Path) -> Vocabulary:
        """From <folder>/tokenizer.json."""
        return cls(json.loads((Path(folder) / "tokenizer.json").read_text(encoding="utf-8")))

    def _read_decoder(self, decoder: dict[str, Any] | None) -> None:
        if decoder is None:
            raise DetokenizerError("tokenizer.json has no decoder; its tokens cannot be joined without guessing")
        steps = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
        fused = False
        for step in steps:
            kind = step["type"]
            if kind == "ByteLevel":
                self._byte_level = True
            elif kind == "Replace" and "String" in step["pattern"]:
                self._replace.append((step["pattern"]["String"], step["content"]))
            elif kind == "ByteFallback":
                self._byte_fallback = True
            elif kind == "Fuse":
                fused = True
            elif kind == "Strip" and fused and step["stop"] == 0:
                self.strip_left, self.strip_content = step["start"], step["content"]
            elif kind == "Metaspace":
                self._replace.append((step["replacement"], " "))
                scheme = step.get("prepend_scheme") or ("always" if step.get("add_prefix_space", True) else "never")
                if scheme != "never":
                    self._first_dropped = step["replacement"]
            else:
                raise DetokenizerError(f"decoder step {step} of tokenizer.json is not one that can be streamed exactly")

    def token_bytes(self, index: int, *, first: bool = False) -> bytes:
        """Bytes a token adds to the text; b"" for an id beyond the tokenizer. `first`: no token came before."""
        if first and self._first_dropped is not None and index in self._tokens:
            return self._encode(self._tokens[index].replace(self._first_dropped, ""))
        found = self._bytes.get(index)
        if found is None:
            token = self._tokens.get(index)
            found = self._bytes[index] = b"" if token is None else self._encode(token)
        return found

    def _encode(self, token: str) -> bytes:
        if self._byte_level:
            # A token with a character outside the alphabet (an added token) stands for itself.
            values = [_ALPHABET.get(character, -1) for character in token]
            return token.encode() if -1 in values else bytes(values)
        if self._byte_fallback and (match := BYTE_TOKEN.match(token)):
            return bytes([int(match.group(1), 16)])
        for old, new in self._replace:
            token = token.replace(old, new)
        return token.encode()

    def known(self, index: int) -> bool:
        return index in self._tokens

    def byte_ids(self, text: str) -> list[int] | None:
        """`text` as one token per byte, or None when the tokenizer lacks such tokens."""
        if self._byte_level:
            names = {byte: character for character, byte in _ALPHABET.items()}
            wanted = [names[byte] for byte in text.encode()]
        else:
            wanted = [f"<0x{byte:02X}>" for byte in text.encode()]
        index_of = {token: index for index, token in self._tokens.items() if len(token) in (1, 6)}
        ids = [index_of.get(token) for token in wanted]
        return None if None in ids else [i for i in ids if i is not None]


class Detokenizer:
    """Incremental decoding of one sequence."""

    def __init__(self, vocabulary: Vocabulary, *, skip_special_tokens: bool = True) -> None:
        self._vocabulary = vocabulary
        self._skipped = vocabulary.special_ids if skip_special_tokens else frozenset()
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._first = True
        self._strip = vocabulary.strip_left

    def feed(self, index: int) -> str:
        """Characters that became whole with this id (often one piece, sometimes "")."""
        if index in self._skipped or not self._vocabulary.known(index):
            return ""
        data = self._vocabulary.token_bytes(index, first=self._first)
        self._first = False
        return self._stripped(self._decoder.decode(data))

    @property
    def pending(self) -> bool:
        """Whether bytes of an unfinished character are held back."""
        return bool(self._decoder.getstate()[0])

    def flush(self) -> str:
        """The end: an unfinished character becomes one U+FFFD, as in the decoding of the whole list."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if not self._strip or not text:
            return text
        while self._strip and text.startswith(self._vocabulary.strip_content):
            text, self._strip = text[1:], self._strip - 1
        if text:
            self._strip = 0
        return text


def decode(vocabulary: Vocabulary, ids: list[int], *, skip_special_tokens: bool = True) -> str:
    """Text of a whole list of ids: what a stream of the same ids joins to."""
    detokenizer = Detokenizer(vocabulary, skip_special_tokens=skip_special_tokens)
    return "".join([detokenizer.feed(index) for index in ids]) + detokenizer.flush()
