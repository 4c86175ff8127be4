"""TensorRT-LLM's own words for a scheme: `quantization` of config.json, and quant_cfg.json where layers differ.

Layers of one format beside unquantized ones are said by `exclude_modules`, which replaces TensorRT-LLM's default
patterns, so these are always written along. Layers of several formats are MIXED_PRECISION: quant_cfg.json names each
quantized module. Module names count layers from the start of a pipeline stage, and one config.json serves all stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lpxbuild.checkpoint.layout import Linear, RankTensor
from lpxbuild.checkpoint.quantized_layout import linear_format
from lpxbuild.errors import RecipeError
from lpxbuild.quantization import FORMATS, KV_CACHE
from lpxbuild.quantization.nvfp4 import BLOCK
from lpxbuild.quantization.scheme import Scheme

DEFAULT_EXCLUDED = (
    "*lm_head",
    "*router",
    "*vocab_embedding",
    "*position_embedding",
    "*block_embedding",
    "*shared_expert_gate*",
    "*fused_a",
)
"""What TensorRT-LLM leaves unquantized where `exclude_modules` is null. (The second star of the shared expert's gate is
for W8A16 and W4A16: there the names of tensors are matched, and its name ends as those of gates that are quantized.)"""
MIXED = "MIXED_PRECISION"


def linear_formats(tensors: Sequence[RankTensor], scheme: Scheme) -> dict[str, str]:
    """TensorRT-LLM module → format, of every linear; the stages of a pipeline agree.

    Raises:
        RecipeError: a mixture of formats that TensorRT-LLM cannot load; names the layers.
    """
    linears = list({id(tensor.linear): tensor.linear for tensor in tensors if tensor.linear is not None}.values())
    formats: dict[str, str] = {}
    layers: dict[str, int] = {}
    for linear in linears:
        found = linear_format(linear, scheme)
        known = formats.setdefault(linear.module, found)
        if known != found:
            raise RecipeError(
                f"{linear.module} is {known} in layer {layers[linear.module]} and {found} in layer {linear.layer}",
                why="each pipeline stage counts its layers from 0, and one config.json serves all stages",
                next="set parallel.pipeline to 1, or let the patterns name the same layers of each stage",
            )
        layers.setdefault(linear.module, linear.layer)
    if len(set(formats.values())) > 1:
        for linear in linears:
            _check_mixture(linear, formats)
    return formats


def _check_mixture(linear: Linear, formats: Mapping[str, str]) -> None:
    name = formats[linear.module]
    parent = linear.module.rpartition(".")[0]
    if linear.module.endswith(".fc") and formats.get(f"{parent}.gate", name) != name:
        raise RecipeError(
            f"{linear.parts[0].module} is {name}, its partner for {parent}.gate is {formats[f'{parent}.gate']}",
            why="TensorRT-LLM runs mlp.fc and mlp.gate as one matrix, which has one format",
            next="let a pattern of quantization.exclude or quantization.overrides name both or none",
        )
    others = sorted(set(formats.values()) - {"none", name})
    if linear.parts[0].expert is not None and (others or name == "none"):
        raise RecipeError(
            f"the experts of {parent} are {name}, other layers are {', '.join(others)}",
            why="TensorRT-LLM gives all mixtures of experts the model's one format",
            next="give the experts the one format beside which layers are left plain, or leave out the patterns",
        )
    if "fp8_pc_pt" in formats.values():
        raise RecipeError(
            f"{linear.module} is {name}, beside layers that are fp8_pc_pt"
            if name != "fp8_pc_pt"
            else f"{linear.module} is fp8_pc_pt, beside layers of other formats",
            why="TensorRT-LLM applies FP8_PER_CHANNEL_PER_TOKEN to whole attention and MLP blocks with their norms",
            next="use fp8_pc_pt without quantization.exclude and quantization.overrides, or choose fp8",
        )


def quantization_fields(formats: Mapping[str, str], scheme: Scheme) -> dict[str, Any]:
    """`quantization` of config.json: only keys that every TensorRT-LLM from 0.16 to 1.2 knows."""
    used = sorted(set(formats.values()) - {"none"})
    fields: dict[str, Any] = {
        "quant_algo": None,
        "kv_cache_quant_algo": KV_CACHE[scheme.kv_cache],
        # A list would replace TensorRT-LLM's defaults (lm_head, embeddings, routers); null keeps them.
        "exclude_modules": None,
    }
    if len(used) > 1:
        return {**fields, "quant_algo": MIXED}
    if used:
        fields |= _algorithm(used[0], scheme)
        left = [module for module, name in formats.items() if name == "none"]
        if left:
            # The builder matches W8A16 and W4A16 against names of tensors as well, hence the star.
            fields["exclude_modules"] = [*DEFAULT_EXCLUDED, *(f"{module}*" for module in left)]
    return fields


def quant_cfg(formats: Mapping[str, str], scheme: Scheme) -> dict[str, Any] | None:
    """quant_cfg.json, or None where there are not several formats."""
    if len(set(formats.values()) - {"none"}) < 2:
        return None
    return {
        "quant_algo": MIXED,
        "kv_cache_quant_algo": KV_CACHE[scheme.kv_cache],
        "quantized_layers": {module: _algorithm(name, scheme) for module, name in formats.items() if name != "none"},
    }


def _algorithm(name: str, scheme: Scheme) -> dict[str, Any]:
    fields: dict[str, Any] = {"quant_algo": FORMATS[name].quant_algo}
    if name in ("int4_rtn", "int4_awq", "w4a8_awq"):
        fields |= {"group_size": scheme.group_size, "has_zero_point": False, "pre_quant_scale": name != "int4_rtn"}
    elif "nvfp4" in name:
        fields["group_size"] = BLOCK
    return fields
