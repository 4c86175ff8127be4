"""RoPE scaling of GGUF files in the words of a config.

Llama 3's is stored as its result, one factor for each frequency (`rope_freqs.weight`), Phi-3's as two such lists.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from lpxbuild.errors import SourceError

if TYPE_CHECKING:
    from lpxbuild.source.gguf.metadata import Metadata

# The settings of all published Llama 3.1, 3.2 and 3.3 models; the factor (8 or 32) is the largest one in the tensor.
LOW_FREQUENCY, HIGH_FREQUENCY, ORIGINAL_LENGTH = 1.0, 4.0, 8192


def read_scaling(metadata: Metadata, factors: list[float] | None = None) -> dict[str, Any] | None:
    """`rope_scaling` of a config; None = plain RoPE.

    Args:
        metadata: of the file.
        factors: the file's `rope_freqs.weight`, if it has one.

    Raises:
        SourceError: a kind that is not read.
    """
    kind = metadata.text(metadata.key("rope.scaling.type")) or "none"
    old_linear = metadata.number(metadata.key("rope.scale_linear"), 1.0)
    if kind == "none" and old_linear != 1.0:
        return {"rope_type": "linear", "factor": old_linear}
    if factors is not None:
        return llama3_scaling(metadata, factors)
    if kind == "none":
        return None
    factor = metadata.number(metadata.key("rope.scaling.factor"))
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = metadata.size(metadata.key("rope.scaling.original_context_length"))
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        for name in ("beta_fast", "beta_slow"):
            if metadata.value(metadata.key(f"rope.scaling.yarn_{name}")) is not None:
                scaling[name] = metadata.number(metadata.key(f"rope.scaling.yarn_{name}"))
        return scaling
    raise metadata.refused(f"has the rope scaling {kind!r}", "lpx reads none, linear, yarn and Llama 3's factors here")


def longrope_scaling(
    metadata: Metadata, short: list[float] | None, long: list[float] | None, *, dimensions: int, length: int
) -> dict[str, Any] | None:
    """Phi-3's scaling: a factor of each frequency up to the original length, and another one beyond.

    Args:
        metadata: of the file.
        short, long: the factors; None where the file has none.
        dimensions: of a head that RoPE turns; there is a factor for every second one.
        length: the longest context of the model.

    Raises:
        SourceError: factors are missing, or attention is scaled by another rule than longrope's.
    """
    if short is None and long is None and metadata.text(metadata.key("rope.scaling.type")) in (None, "none"):
        return None
    if short is None or long is None or {len(short), len(long)} != {dimensions // 2}:
        raise metadata.refused(
            f"has {len(short or [])} short and {len(long or [])} long rope factors for {dimensions} dimensions",
            f"longrope, the only scaling of this architecture, needs {dimensions // 2} of each",
        )
    original = metadata.size(metadata.key("rope.scaling.original_context_length"))
    ratio = length / original
    # The factor that transformers derives from the two lengths; llama.cpp's converter writes it into the file.
    derived = math.sqrt(1 + math.log(ratio) / math.log(original)) if ratio > 1 else 1.0
    stated = metadata.number(metadata.key("rope.scaling.attn_factor"), derived)
    if not math.isclose(stated, derived, rel_tol=1e-5):
        raise metadata.refused(
            f"scales attention by {stated}", f"longrope from {original} to {length} positions scales it by {derived:g}"
        )
    return {"type": "longrope", "short_factor": short, "long_factor": long}


def llama3_scaling(metadata: Metadata, factors: list[float]) -> dict[str, Any] | None:
    """The `rope_scaling` that these factors come from; None where all are 1.

    Raises:
        SourceError: no setting of Llama 3 gives these factors.
    """
    if all(factor == 1.0 for factor in factors):
        return None
    base = metadata.number(metadata.key("rope.freq_base"), 10000.0)
    factor = float(max(factors))
    expected = llama3_factors(metadata.head_size(), base, factor)
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
