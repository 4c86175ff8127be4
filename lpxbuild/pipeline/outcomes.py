"""How an evidence stage ends when it proves nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lpxbuild.errors import LpxError, VerdictError


class EvidenceFailed(VerdictError):
    """An evidence stage ran and found failures; `evidence` is its report, `files` the forms to show."""

    def __init__(
        self, what: str, *, stage: str, why: str, next: str, evidence: dict[str, Any], files: Mapping[str, str]
    ) -> None:
        super().__init__(what, why=why, next=next)
        self.stage = stage
        self.evidence = evidence
        self.files = files


class EvidenceMissing(LpxError):
    """An evidence stage began and could not judge: nothing failed, nothing is proven, nothing goes into the cache."""
