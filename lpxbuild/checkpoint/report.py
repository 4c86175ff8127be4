"""What a conversion tells the manifest."""

from __future__ import annotations

from dataclasses import dataclass, field

from lpxbuild.checkpoint.statistics import Extent


@dataclass(frozen=True)
class RankStatistics:
    """One rank file: name, bytes on disk, number of tensors."""

    file: str
    bytes: int
    tensors: int


@dataclass(frozen=True)
class OverflowedTensor:
    """A rank tensor with finite source values that became infinite: how many, and the largest magnitude among them."""

    rank: int
    tensor: str
    count: int
    largest: float


@dataclass(frozen=True)
class ConversionReport:
    """Statistics of one conversion.

    Attributes:
        dtype: element type of the checkpoint ("bfloat16").
        parameters: elements of the model, counted once (no copies, no padding).
        ranks: the rank files.
        casts: source type → number of source tensors that were cast from it ({} = all copied).
        overflows: tensors that lost numbers in the cast.
        kv_amax: attention module → largest keys and values of the calibration, where the KV cache is quantized.
        extents: source tensor → its largest finite magnitude, and how many of its numbers are NaN or infinite.
        workers: threads that worked.
        memory_needed: anonymous bytes planned for all workers.
        seconds: wall time.
    """

    dtype: str
    quantization_format: str
    parameters: int
    ranks: tuple[RankStatistics, ...]
    casts: dict[str, int] = field(default_factory=dict)
    overflows: tuple[OverflowedTensor, ...] = ()
    kv_amax: dict[str, tuple[float, float]] = field(default_factory=dict)
    extents: dict[str, Extent] = field(default_factory=dict)
    workers: int = 1
    memory_needed: int = 0
    seconds: float = 0.0

    @property
    def bytes(self) -> int:
        """Bytes of all rank files."""
        return sum(rank.bytes for rank in self.ranks)
