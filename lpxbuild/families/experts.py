"""Rules and fields of sparse MLPs.

TensorRT-LLM stacks the experts of a layer: mlp.fc is (experts, [up; gate], in) and mlp.proj (experts, out, in), every
rank with its own columns of each expert. The router is kept in float32 on every rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lpxbuild.errors import SourceError
from lpxbuild.families.reading import flag, positive_int
from lpxbuild.families.rules import HF, MLP, Rules, gated_mlp
from lpxbuild.families.shape import MixtureOfExperts, ModelShape
from lpxbuild.families.weights import Part, WeightRule
from lpxbuild.families.window import Window

_COMPARE = "compare config.json with the original repository of the model"


def _sparse(shape: ModelShape, layer: int) -> bool:
    return shape.moe is not None and layer not in shape.moe.dense_layers


def _dense(shape: ModelShape, layer: int) -> bool:
    return not _sparse(shape, layer)


def _shared(shape: ModelShape) -> bool:
    return shape.moe is not None and shape.moe.shared_intermediate_size > 0


def sparse_mlp(router: str, expert: str, *, gate: str, up: str, down: str) -> Rules:
    """mlp.router, mlp.fc and mlp.proj of the layers that have experts.

    Args:
        router: HF module of the router.
        expert: HF module of one expert, with `{expert}` and `{layer}`.
        gate, up, down: names of its linears; `gate` is the activated one.
    """
    inner = ("expert_intermediate", "hidden")
    return (
        WeightRule(
            f"{MLP}router.weight",
            (Part(f"{router}.weight", ("experts", "hidden")),),
            "replicated",
            layers=_sparse,
            dtype="F32",
        ),
        WeightRule(
            f"{MLP}fc.weight",
            (Part(f"{expert}.{up}.weight", inner, "up"), Part(f"{expert}.{gate}.weight", inner, "gate")),
            "column",
            layers=_sparse,
            experts=True,
        ),
        WeightRule(
            f"{MLP}proj.weight",
            (Part(f"{expert}.{down}.weight", inner[::-1], "proj"),),
            "row",
            layers=_sparse,
            experts=True,
        ),
    )


def shared_expert(source: str = f"{HF}mlp.shared_expert") -> Rules:
    """The expert of every token: mlp.shared_expert.fc = [up; gate], proj, and the gate in front of it."""
    inner = ("shared_intermediate", "hidden")
    return (
        WeightRule(
            f"{MLP}shared_expert.fc.weight",
            (Part(f"{source}.up_proj.weight", inner, "up"), Part(f"{source}.gate_proj.weight", inner, "gate")),
            "column",
            when=_shared,
            layers=_sparse,
        ),
        WeightRule(
            f"{MLP}shared_expert.proj.weight",
            (Part(f"{source}.down_proj.weight", inner[::-1], "proj"),),
            "row",
            when=_shared,
            layers=_sparse,
        ),
        WeightRule(
            f"{MLP}shared_expert_gate.weight",
            (Part(f"{source}_gate.weight", ("one", "hidden")),),
            "replicated",
            when=_shared,
            layers=_sparse,
        ),
    )


def dense_mlp() -> Rules:
    """The ordinary gated MLP of the layers that have no experts."""
    return tuple(replace(rule, layers=_dense) for rule in gated_mlp())


def routed(config: Mapping[str, Any], experts_key: str, intermediate: int, *, renormalize: bool) -> MixtureOfExperts:
    """Number of experts, and of those a token goes to.

    Raises:
        SourceError: a token goes to more experts than there are, or there is only one.
    """
    count, chosen = positive_int(config, experts_key), positive_int(config, "num_experts_per_tok")
    if count < 2 or chosen > count:
        raise SourceError(
            f"config.json: {experts_key} is {count} and num_experts_per_tok {chosen}",
            why="TensorRT-LLM takes a model as a mixture from two experts on, and each token goes to at most all",
            next=_COMPARE,
        )
    return MixtureOfExperts(num_experts=count, top_k=chosen, intermediate_size=intermediate, renormalize=renormalize)


def moe_fields(moe: MixtureOfExperts) -> dict[str, Any]:
    """TensorRT-LLM's MoeConfig, where an unknown key is an error. normalization_mode 1 = RENORMALIZE, 0 = NONE."""
    return {
        "num_experts": moe.num_experts,
        "top_k": moe.top_k,
        "normalization_mode": 1 if moe.renormalize else 0,
    }


def rebuilt(config: Mapping[str, Any], intermediate: int) -> MixtureOfExperts:
    """The way back from `moe_fields`."""
    moe = config["moe"]
    return MixtureOfExperts(
        num_experts=moe["num_experts"],
        top_k=moe["top_k"],
        intermediate_size=intermediate,
        renormalize=moe["normalization_mode"] == 1,
    )


def qwen_experts(config: Mapping[str, Any], shape: ModelShape, *, shared: bool) -> MixtureOfExperts:
    """The mixture of a Qwen config; transformers' rule for which layers stay dense.

    Raises:
        SourceError: a number is wrong, or no layer has experts.
    """
    step = positive_int(config, "decoder_sparse_step")
    named = config.get("mlp_only_layers") or []
    if not isinstance(named, list) or any(type(layer) is not int for layer in named):
        raise SourceError(
            f"config.json: mlp_only_layers is {named!r}", why="a list of numbers of layers is needed", next=_COMPARE
        )
    layers = range(shape.num_hidden_layers)
    dense = tuple(layer for layer in layers if layer in named or (layer + 1) % step)
    if len(dense) == len(layers):
        raise SourceError(
            "config.json: mlp_only_layers and decoder_sparse_step leave no layer with experts",
            why="a model without experts belongs to the family without them",
            next=_COMPARE,
        )
    moe = routed(
        config,
        "num_experts",
        positive_int(config, "moe_intermediate_size"),
        renormalize=flag(config, "norm_topk_prob", False),
    )
    size = positive_int(config, "shared_expert_intermediate_size") if shared else 0
    return replace(moe, shared_intermediate_size=size, dense_layers=dense)


def qwen_moe_fields(shape: ModelShape) -> dict[str, Any]:
    """What QWenConfig has for mixtures. All dense layers are listed, whichever of HF's two keys named them."""
    assert shape.moe is not None
    return {
        "moe": moe_fields(shape.moe),
        "moe_intermediate_size": shape.moe.intermediate_size,
        "moe_shared_expert_intermediate_size": shape.moe.shared_intermediate_size,
        "mlp_only_layers": list(shape.moe.dense_layers),
        "decoder_sparse_step": 1,
    }


def qwen_rebuilt(config: Mapping[str, Any]) -> MixtureOfExperts:
    """The way back from `qwen_moe_fields`."""
    return replace(
        rebuilt(config, config["moe_intermediate_size"]),
        shared_intermediate_size=config["moe_shared_expert_intermediate_size"],
        dense_layers=tuple(config["mlp_only_layers"]),
    )


def qwen_moe_window(config: Mapping[str, Any], _layers: int) -> Window:
    """transformers' masks of the Qwen mixtures: every layer has the window once use_sliding_window switches it on."""
    if not flag(config, "use_sliding_window", False) or config.get("sliding_window") is None:
        return None, None
    return positive_int(config, "sliding_window"), None
