"""Text and ids of one generated sequence as they may be shown: whole characters, cut before a stop word."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from detokenizer import Detokenizer, Vocabulary
from stop_words import StopWords


@dataclass
class Piece:
    """What became visible: text, and the ids whose text is now out (with their log-probabilities, if any)."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.text or self.ids)


class GenerationText:
    """Pieces joined are the same text and ids whether they are shown one by one or at the end.

    An id comes out with the last character of its text. When a stop word cuts the text, the ids are the shortest
    prefix that covers what is left of it.
    """

    def __init__(
        self, vocabulary: Vocabulary, stop_words: Sequence[str] = (), *, skip_special_tokens: bool = True
    ) -> None:
        self._detokenizer = Detokenizer(vocabulary, skip_special_tokens=skip_special_tokens)
        self._stop_words = StopWords(stop_words)
        # (id, log-probability or None, characters of the whole text up to and with this id)
        self._waiting: deque[tuple[int, float | None, int]] = deque()
        self._unfinished: list[tuple[int, float | None]] = []
        self._decoded = 0
        self._shown = 0
        self._covered = 0

    @property
    def stopped(self) -> bool:
        """A stop word was found: nothing more will come, the engine may stop."""
        return self._stop_words.found is not None

    def feed(self, ids: Sequence[int], log_probs: Sequence[float] = ()) -> Piece:
        """New ids from the engine (no end ids among them)."""
        piece = Piece()
        for position, index in enumerate(ids):
            if self.stopped:
                break
            self._place(index, log_probs[position] if log_probs else None, piece)
            self._release(piece)
        return piece

    def finish(self) -> Piece:
        """The engine ended the sequence: everything held back comes out."""
        piece = Piece()
        if not self.stopped:
            self._show(self._detokenizer.flush(), piece)
            self._settle(self._decoded)
            if not self.stopped:
                rest = self._stop_words.flush()
                piece.text += rest
                self._shown += len(rest)
        self._release(piece)
        return piece

    def _place(self, index: int, log_prob: float | None, piece: Piece) -> None:
        before = self._decoded
        text = self._detokenizer.feed(index)
        if text:
            # Bytes held back from earlier ids belong to the first character that came out.
            self._settle(before + 1)
        self._unfinished.append((index, log_prob))
        if not self._detokenizer.pending:
            self._settle(before + len(text))
        self._show(text, piece)

    def _show(self, text: str, piece: Piece) -> None:
        self._decoded += len(text)
        visible = self._stop_words.feed(text)
        piece.text += visible
        self._shown += len(visible)

    def _settle(self, end: int) -> None:
        for index, log_prob in self._unfinished:
            self._waiting.append((index, log_prob, end))
        self._unfinished.clear()

    def _release(self, piece: Piece) -> None:
        if self.stopped:
            self._settle(self._decoded)
        while self._waiting:
            index, log_prob, end = self._waiting[0]
            if (self._covered >= self._shown) if self.stopped else (end > self._shown):
                break
            self._waiting.popleft()
            self._covered = end
            piece.ids.append(index)
            if log_prob is not None:
                piece.log_probs.append(log_prob)
        if self.stopped:
            self._waiting.clear()
