"""Stop words matched on text, across pieces: what may be shown, and when generation ends."""

from __future__ import annotations

from collections.abc import Sequence


class StopWords:
    """Watches one sequence's text.

    Text that could be the start of a stop word is held back until it is decided. Of several words the one that is
    complete first wins (of those complete at the same character, the longest), whatever the pieces are.
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.words = tuple(word for word in words if word)
        self.found: str | None = None
        self._held = ""
        self._longest = max((len(word) for word in self.words), default=0)

    def feed(self, text: str) -> str:
        """Text that is safe to show now. Once `found` is set nothing more comes."""
        if not self.words:
            return text
        if self.found is not None:
            return ""
        whole = self._held + text
        for end in range(len(self._held) + 1, len(whole) + 1):
            matches = [word for word in self.words if whole.endswith(word, 0, end)]
            if matches:
                self.found = max(matches, key=len)
                self._held = ""
                return whole[: end - len(self.found)]
        kept = 0
        for size in range(min(self._longest - 1, len(whole)), 0, -1):
            if self._begins(whole[-size:]):
                kept = size
                break
        split = len(whole) - kept
        self._held = whole[split:]
        return whole[:split]

    def _begins(self, text: str) -> bool:
        """Whether a word begins so and is longer. Compared, not looked up: all beginnings of a word of n letters
        take n² / 2 letters of memory."""
        return any(len(word) > len(text) and word.startswith(text) for word in self.words)

    def flush(self) -> str:
        """The generation ended: what was held back is text after all."""
        text, self._held = self._held, ""
        return text
