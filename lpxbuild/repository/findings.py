"""What `validate` reports."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Args:
        file: path inside the repository.
        key: parameter, field or tensor; "" where the whole file is meant.
        message: what was found and what must be there.
    """

    file: str
    key: str
    message: str

    def __str__(self) -> str:
        return ": ".join(part for part in (self.file, self.key, self.message) if part)
