"""The model, as a whole or layer by layer.

Layer by layer no more than one decoder layer (or one table) of weights is in memory: parameters stay on the meta
device, and each part of the model reads its own from the safetensors files when it is called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODEL_REFUSED, HOST_LACKS = 2, 3
"""Exit statuses that lpx translates; any other but 0 is a failure."""


class Refused(Exception):
    """Ends the child with a status and a last line."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def attention_of(config: Any) -> str:
    """`eager` is the plain formula (soft-caps too); Falcon's adds ALiBi's bias twice, its `sdpa` once."""
    return "sdpa" if config.model_type == "falcon" else "eager"


def whole(folder: str) -> Any:
    """The model in float32, all of it in memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation=attention_of(config),
        local_files_only=True,
        trust_remote_code=False,
    )


def layerwise(folder: str) -> Any:
    """The model with its parameters on the meta device, each part loading its own while it runs."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(
            config, torch_dtype=torch.float32, attn_implementation=attention_of(config), trust_remote_code=False
        )
    model.tie_weights()
    tensors = Tensors(Path(folder), model)
    inside: set[int] = set()
    for layer_name, layer in decoder_layers(model):
        tensors.attach(layer_name, layer)
        inside |= {id(module) for module in layer.modules()}
    for name, module in model.named_modules():
        if id(module) not in inside and next(iter(module.parameters(recurse=False)), None) is not None:
            tensors.attach(name, module)
    return model


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Buffers (tables of positions and frequencies) are computed as always; parameters get no memory."""
    import torch

    original = torch.nn.Module.register_parameter

    def register(module: Any, name: str, parameter: Any) -> None:
        if parameter is not None:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
        original(module, name, parameter)

    torch.nn.Module.register_parameter = register
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = original


class Tensors:
    """The parameters of a model by their place in the safetensors files."""

    def __init__(self, folder: Path, model: Any) -> None:
        from safetensors import safe_open

        self.files: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                self.files.update(dict.fromkeys(file.keys(), path))
        self.prefix = f"{model.base_model_prefix}."
        self.names: dict[int, list[str]] = {}  # a tied parameter has several names
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(parameter), []).append(name)

    def attach(self, name: str, module: Any) -> None:
        """Load before each call of the module, forget after it."""
        wanted = [
            (owner, leaf, parameter, self._find(parameter, name))
            for owner in module.modules()
            for leaf, parameter in owner.named_parameters(recurse=False)
        ]

        def load(_module: Any, _arguments: Any) -> None:
            import torch
            from safetensors import safe_open

            for owner, leaf, _, (stored, path) in wanted:
                with safe_open(path, "pt") as file:
                    tensor = file.get_tensor(stored).to(torch.float32)
                owner._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)

        def forget(_module: Any, _arguments: Any, _output: Any) -> None:
            for owner, leaf, parameter, _ in wanted:
                owner._parameters[leaf] = parameter

        module.register_forward_pre_hook(load)
        module.register_forward_hook(forget)

    def _find(self, parameter: Any, module: str) -> tuple[str, Path]:
        for name in self.names[id(parameter)]:
            for stored in (name, name.removeprefix(self.prefix)):
                if stored in self.files:
                    return stored, self.files[stored]
        name = self.names[id(parameter)][0]
        raise Refused(MODEL_REFUSED, f"layer by layer: no file of the model has the tensor {name} of {module}")


def decoder_layers(model: Any) -> list[tuple[str, Any]]:
    """(name, module) of the decoder layers: the outermost list that has as many entries as the config has layers."""
    import torch

    count = model.config.num_hidden_layers
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == count
    ]
    if not lists:
        raise Refused(MODEL_REFUSED, f"{type(model).__name__} has no list of {count} decoder layers")
    name, module = min(lists, key=lambda entry: len(entry[0]))
    return [(f"{name}.{index}", layer) for index, layer in enumerate(module)]
