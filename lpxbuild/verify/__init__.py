"""Compares what was built with its source: an independent numeric verdict in bounded memory.

The reference is transformers on the source, in a process that imports nothing of lpxbuild. The candidate is the engine
that lpx compiled, or, of a unified checkpoint, its dequantized weights.
"""

from __future__ import annotations

from lpxbuild.verify.built import VerifyInput
from lpxbuild.verify.checks import cannot_run
from lpxbuild.verify.running import run
from lpxbuild.verify.verdict import Verdict, VerifyFailed

__all__ = ["Verdict", "VerifyFailed", "VerifyInput", "cannot_run", "run"]
