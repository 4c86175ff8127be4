"""Factors between a norm and the linears behind it, as AWQ and SmoothQuant found them for each linear of its own.

A linear's input is multiplied by its `pre_quant_scale` and its weight divided by it. Linears of one input must share
the factors, so weights are moved from their own to the mean; what the norm in front can take over is folded into it.
Each step is rounded to the weights' type, as ModelOpt's export does, which rewrites the weights in place.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from lpxbuild.checkpoint.cast import Array
from lpxbuild.checkpoint.unified.modules import Group, Modules, Norm
from lpxbuild.quantization import awq
from lpxbuild.quantization.calibrated import Calibration

SMOOTHED = ("int4_awq", "w4a8_awq", "int8_sq")
"""Formats whose calibration finds factors."""
AWQ = ("int4_awq", "w4a8_awq")
"""Those whose factors are folded into norms."""


@dataclass(frozen=True)
class Smoothing:
    """The factors of one linear.

    Attributes:
        found: by the calibration, in float32 where it kept them so.
        steps: in the checkpoint's type, one after the other: found, mean over the experts, mean over the group.
        stored: whether the checkpoint names the last ones, because no norm has taken them over.
    """

    found: Array
    steps: tuple[Array, ...]
    stored: bool

    @property
    def factors(self) -> Array:
        """What the input is multiplied with in the end."""
        return self.steps[-1]

    def smooth(self, weight: Array) -> Array:
        """Rows of the weight as they are quantized, in their own type."""
        smoothed = awq.smooth(weight, self.found)
        for old, new in zip(self.steps, self.steps[1:]):
            smoothed = awq.move(smoothed, old, new)
        return smoothed


def smoothings(
    modules: Modules, formats: Mapping[str, str], calibration: Calibration, dtype: np.dtype[np.generic]
) -> dict[str, Smoothing]:
    """Module → its factors, for every linear of a format that has some.

    An expert that no text of the calibration reached has none: it takes the mean of the others as its own.
    """
    wanted = [module.name for module in modules.linears if formats[module.name] in SMOOTHED]
    exact = {name: calibration.pre_quant_scale(name) for name in wanted if calibration.has_factors(name)}
    found = {name: [factors.astype(dtype)] for name, factors in exact.items()}
    for siblings in dict.fromkeys(modules.siblings().values()):
        names = [name for name in siblings if formats[name] in AWQ]
        known = [name for name in names if name in found]
        if known:
            _move(found, known)
            exact |= {name: found[known[0]][-1] for name in names if name not in exact}
            found |= {name: [exact[name]] for name in names if name not in found}
    for name in wanted:
        if name not in found:
            calibration.pre_quant_scale(name)  # says what is missing
    for group in modules.groups:
        names = [module.name for module in group.modules if module.name in found]
        if len(names) > 1:
            _move(found, names)
    folded = {module.name for group in modules.groups if folds(group, formats) for module in group.modules}
    return {name: Smoothing(exact[name], tuple(steps), stored=name not in folded) for name, steps in found.items()}


def folds(group: Group, formats: Mapping[str, str]) -> bool:
    """Whether the norm in front of the group takes over its factors."""
    return group.norm is not None and all(formats[module.name] in AWQ for module in group.modules)


def fold(norm: Norm, tensor: str, values: Array, factors: Array) -> Array:
    """A norm's weight or bias with the factors in it, each operation rounded to the type as torch does.

    Norms that multiply by 1 + weight get (1 + weight) · factors - 1.
    """
    one = np.ones((), values.dtype)
    plus_one = norm.plus_one and tensor == norm.tensors[0]
    folded: Array = _rounded((values + one if plus_one else values) * factors, values)
    return _rounded(folded - one, values) if plus_one else folded


def _rounded(values: Array, like: Array) -> Array:
    return values.astype(like.dtype)


def _move(found: dict[str, list[Array]], names: Sequence[str]) -> None:
    common = awq.merged_scale([found[name][-1] for name in names])
    for name in names:
        if not np.array_equal(found[name][-1], common):
            found[name].append(common)
