"""Ask a served repository what it must be able to do, with tritonclient, over HTTP and gRPC."""

from __future__ import annotations

from lpxbuild.smoke.registry import SmokePrompt
from lpxbuild.smoke.report import Check, SmokeReport
from lpxbuild.smoke.running import Endpoints, run

__all__ = ["Check", "Endpoints", "SmokePrompt", "SmokeReport", "run"]
