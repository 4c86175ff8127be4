"""Rounding of float32 to very small types by one look into a table of 65,536 entries.

The upper 16 bits of a float32 say sign, exponent and seven bits of the fraction. If no limit between two results needs
more than six of those, the seventh is free to say whether anything lies below it: set where the lower half is not zero.
Then every number has the same result as the float32 that its upper half alone stands for.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Float32 = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]


def by_upper_half(rule: Callable[[Float32], Codes]) -> Codes:
    """The table of a rule: what it gives for each float32 whose lower half is zero."""
    return rule((np.arange(1 << 16, dtype=np.uint32) << np.uint32(16)).view(np.float32))


def index(values: Float32) -> npt.NDArray[np.uint16]:
    """Where each number lies in such a table."""
    halves: npt.NDArray[Any] = np.ascontiguousarray(values).view("<u2").reshape(*values.shape, 2)
    found: npt.NDArray[np.uint16] = halves[..., 1].copy()
    found |= halves[..., 0] != 0
    return found
