"""Reads the cases in `data/`: each folder is a tiny Hugging Face checkpoint with the outcome it must have."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parent / "data"


@dataclass(frozen=True)
class Case:
    """One case: its folder and what case.json says."""

    path: Path
    expected: dict[str, Any]

    @property
    def tensor_parallel(self) -> int:
        return int(self.expected["recipe"]["tp_size"])

    def missing_words(self, text: str) -> list[list[str]]:
        """Groups of `notice` of which no word stands in the text, upper and lower case alike."""
        found = text.lower()
        return [group for group in self.expected["notice"] if not any(word.lower() in found for word in group)]


@pytest.fixture(scope="session")
def load_case() -> Callable[[str], Case]:
    """Case by name."""
    return lambda name: Case(DATA / name, json.loads((DATA / name / "case.json").read_text()))
