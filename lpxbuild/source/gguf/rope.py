"""Llama 3's rope scaling, which GGUF stores as its result: one factor for each frequency (`rope_freqs.weight`)."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lpxbuild.errors import SourceError
from lpxbuild.source.gguf.metadata import ARCHITECTURE, head_size

if TYPE_CHECKING:
    from lpxbuild.source.gguf.metadata import Metadata

# The settings of all published Llama 3.1, 3.2 and 3.3 models; the factor (8 or 32) is the largest one in the tensor.
LOW_FREQUENCY, HIGH_FREQUENCY, ORIGINAL_LENGTH = 1.0, 4.0, 8192


def llama3_scaling(metadata: Metadata, factors: list[float]) -> dict[str, Any] | None:
    """The `rope_scaling` that these factors come from; None where all are 1.

    Raises:
        SourceError: no setting of Llama 3 gives these factors.
    """
    if all(factor == 1.0 for factor in factors):
        return None
    base = metadata.number(f"{ARCHITECTURE}.rope.freq_base", 10000.0)
    factor = float(max(factors))
    expected = llama3_factors(head_size(metadata), base, factor)
    fits = len(factors) == len(expected) and all(
        math.isclose(found, wanted, rel_tol=1e-4) for found, wanted in zip(factors, expected)
    )
    if not fits:
        raise SourceError(
            f"{metadata.file.name} has rope factors (rope_freqs.weight) that are not those of Llama 3",
            why=f"tried factor {factor}, low {LOW_FREQUENCY}, high {HIGH_FREQUENCY}, {ORIGINAL_LENGTH} positions",
            next="give the Hugging Face folder or hub id of this model",
        )
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LOW_FREQUENCY,
        "high_freq_factor": HIGH_FREQUENCY,
        "original_max_position_embeddings": ORIGINAL_LENGTH,
    }


def llama3_factors(head: int, base: float, factor: float) -> list[float]:
    """What llama.cpp's converter writes (convert_hf_to_gguf.py, `rope_freqs`): divisor of each frequency."""
    low, high = ORIGINAL_LENGTH / LOW_FREQUENCY, ORIGINAL_LENGTH / HIGH_FREQUENCY
    result = []
    for index in range(0, head, 2):
        wavelength = 2 * math.pi * base ** (index / head)
        if wavelength < high:
            result.append(1.0)
        elif wavelength > low:
            result.append(factor)
        else:
            smooth = (ORIGINAL_LENGTH / wavelength - LOW_FREQUENCY) / (HIGH_FREQUENCY - LOW_FREQUENCY)
            result.append(1 / ((1 - smooth) / factor + smooth))
    return result
