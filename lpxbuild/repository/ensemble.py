"""The ensemble's wiring: every step exists, every tensor is made once, used, and of the same type at both ends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from lpxbuild.repository.config import CONFIG_FILE, read_tensor
from lpxbuild.repository.findings import Finding
from lpxbuild.repository.tensors import ENSEMBLE, Tensor

if TYPE_CHECKING:
    ModelConfig = Any  # tritonclient ships no types

_FILE = f"{ENSEMBLE}/{CONFIG_FILE}"


def check_ensemble(configs: dict[str, ModelConfig]) -> Iterator[Finding]:
    """Follow the tensors through the steps.

    Args:
        configs: model -> parsed configuration; must hold the ensemble's.
    """
    config = configs[ENSEMBLE]
    own_inputs = {message.name: read_tensor(message) for message in config.input}
    own_outputs = {message.name: read_tensor(message) for message in config.output}
    # What exists so far: ensemble tensor -> (who made it, the tensor as its maker declares it).
    made: dict[str, tuple[str, Tensor]] = {name: ("the request", tensor) for name, tensor in own_inputs.items()}
    used: set[str] = set()
    models = [step.model_name for step in config.ensemble_scheduling.step]
    if not models:
        yield Finding(_FILE, "ensemble_scheduling", "has no steps")
    for model in models:
        if model not in configs:
            yield Finding(_FILE, f"step {model}", "the repository has no such model that could be read")
    if not models or not configs.keys() >= set(models):
        return  # every tensor of the missing step would be one more finding with the same cause
    for step in config.ensemble_scheduling.step:
        model = step.model_name
        inputs = {message.name: read_tensor(message) for message in configs[model].input}
        outputs = {message.name: read_tensor(message) for message in configs[model].output}
        for name, tensor in inputs.items():
            if not tensor.optional and name not in step.input_map:
                yield Finding(_FILE, f"step {model}", f"the required input {name} is not mapped")
        for name, source in sorted(step.input_map.items()):
            if name not in inputs:
                yield Finding(_FILE, f"step {model}", f"the model has no input {name}")
            elif source not in made:
                yield Finding(_FILE, f"step {model}", f"{source} (for {name}) is made by no earlier step and no input")
            else:
                used.add(source)
                yield from _check_types(f"step {model}", made[source], inputs[name])
        for name, target in sorted(step.output_map.items()):
            if name not in outputs:
                yield Finding(_FILE, f"step {model}", f"the model has no output {name}")
            elif target in made:
                yield Finding(_FILE, f"step {model}", f"{target} is already made by {made[target][0]}")
            else:
                made[target] = (model, outputs[name])
    for name, tensor in own_outputs.items():
        if name not in made:
            yield Finding(_FILE, f"output {name}", "is made by no step")
        else:
            used.add(name)
            yield from _check_types(f"output {name}", made[name], tensor)
    for name, (maker, _) in made.items():
        if name not in used:
            yield Finding(_FILE, name, f"comes from {maker} and is used by nothing")


def _check_types(where: str, source: tuple[str, Tensor], target: Tensor) -> Iterator[Finding]:
    maker, made = source
    if made.data_type != target.data_type:
        text = f"{target.name} is {target.data_type}, {maker} makes {made.name} as {made.data_type}"
        yield Finding(_FILE, where, text)
    fits = len(made.dims) == len(target.dims) and all(-1 in (a, b) or a == b for a, b in zip(made.dims, target.dims))
    if not fits:
        text = f"{target.name} has shape {list(target.dims)}, {maker} makes {made.name} as {list(made.dims)}"
        yield Finding(_FILE, where, text)
