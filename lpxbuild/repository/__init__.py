"""Triton model repositories: rendered from an engine, and validated.

`render` writes the official `inflight_batcher_llm` layout; `validate` checks one, freshly made or edited.
"""

from __future__ import annotations

from lpxbuild.repository.findings import Finding
from lpxbuild.repository.render import RepositoryReport, render
from lpxbuild.repository.request_inputs import request_inputs_table
from lpxbuild.repository.settings import RepositorySettings
from lpxbuild.repository.validate import validate

__all__ = ["Finding", "RepositoryReport", "RepositorySettings", "render", "request_inputs_table", "validate"]
