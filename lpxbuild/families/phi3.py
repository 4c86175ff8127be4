"""Phi-3, 3.5 and 4: qkv and the two MLP branches lie in one HF tensor each; longrope; only part of a head may turn.

HF's gate_up_proj is [gate; up]; each rank's mlp.fc is [up; gate] of its own columns, because the layer halves what it
holds. (TensorRT-LLM's own converter cuts the whole tensor instead, so that with two ranks one has no gate.)
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from lpxbuild.errors import SourceError
from lpxbuild.families.family import Family, Rope
from lpxbuild.families.reading import positive_float, positive_int
from lpxbuild.families.rope import kind_of, long_rope_magnitude, spelled
from lpxbuild.families.rules import ATTENTION, HF, LAYER, MLP, embedding, fused_qkv, head, linear, norm
from lpxbuild.families.shape import ModelShape
from lpxbuild.families.weights import Part, WeightRule
from lpxbuild.families.window import one_window

_COMPARE = "compare config.json with the original repository of the model"
_ORIGINAL = 4096  # transformers' default
_GATE_UP = f"{HF}mlp.gate_up_proj.weight"


def _rope(config: Mapping[str, Any], default_theta: float, positions: int) -> Rope:
    base, scaling, parameters = spelled(config, default_theta)
    if scaling.get("type") in ("su", "yarn"):  # transformers' own reading: names of longrope before it had one
        scaling = {**scaling, "type": "longrope", "rope_type": "longrope"}
    if kind_of(scaling, ("default", "longrope")) == "default":
        return base, None
    original = positive_int({**parameters, **config}, "original_max_position_embeddings", _ORIGINAL)
    magnitude = long_rope_magnitude(positions, original)
    explicit = scaling.get("attention_factor")
    if explicit is not None and not math.isclose(
        positive_float(scaling, "attention_factor", where="rope_scaling."), magnitude, rel_tol=1e-6
    ):
        raise SourceError(
            f"config.json: rope_scaling has attention_factor {explicit!r}",
            why=f"TensorRT-LLM computes {magnitude:.6f} from the lengths and has no field for another one",
            next=_COMPARE,
        )
    return base, {
        "rope_type": "longrope",
        "short_factor": _factors(scaling, "short_factor"),
        "long_factor": _factors(scaling, "long_factor"),
        "original_max_position_embeddings": original,
        "attention_factor": magnitude,
    }


def _factors(scaling: Mapping[str, Any], key: str) -> list[float]:
    value = scaling.get(key)
    if not isinstance(value, list) or not all(
        isinstance(item, (int, float)) and not isinstance(item, bool) and item > 0 for item in value
    ):
        raise SourceError(
            f"config.json: rope_scaling.{key} is {value!r}", why="a list of numbers is needed", next=_COMPARE
        )
    return [float(item) for item in value]


def _further(config: Mapping[str, Any], shape: ModelShape) -> dict[str, Any]:
    if shape.head_size * shape.num_attention_heads != shape.hidden_size:
        raise SourceError(
            f"config.json: head_dim is {shape.head_size}",
            why=f"TensorRT-LLM's class takes hidden_size / num_attention_heads = "
            f"{shape.hidden_size // shape.num_attention_heads}",
            next="use a model of this family whose heads have that size",
        )
    nested = config.get("rope_parameters")
    holder = {**(nested if isinstance(nested, Mapping) else {}), **config}
    share = positive_float(holder, "partial_rotary_factor", 1.0)
    turned = int(shape.head_size * share)
    for key in ("short_factor", "long_factor"):
        count = len((shape.rotary_scaling or {}).get(key, range(turned // 2)))
        if count != turned // 2:
            raise SourceError(
                f"config.json: rope_scaling.{key} has {count} numbers",
                why=f"RoPE turns {turned} dimensions of each head, so {turned // 2} are needed",
                next=_COMPARE,
            )
    return {"rotary_pct": share}


FAMILY = Family(
    name="phi3",
    architectures=("Phi3ForCausalLM",),
    attention=("sliding_window", "long_rope"),
    defaults={
        "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-5,
    },
    mlp="fused",
    window=one_window,
    rope=_rope,
    further=_further,
    weights=(
        *embedding(),
        *norm(f"{LAYER}input_layernorm", f"{HF}input_layernorm"),
        *fused_qkv(f"{HF}self_attn.qkv_proj"),
        *linear(f"{ATTENTION}dense", f"{HF}self_attn.o_proj", "dense", "row", "hidden", "query"),
        *norm(f"{LAYER}post_layernorm", f"{HF}post_attention_layernorm"),
        WeightRule(
            f"{MLP}fc.weight",
            (
                Part(_GATE_UP, ("intermediate", "hidden"), "up", after=("intermediate",)),
                Part(_GATE_UP, ("intermediate", "hidden"), "gate"),
            ),
            "column",
        ),
        *linear(f"{MLP}proj", f"{HF}mlp.down_proj", "proj", "row", "hidden", "intermediate"),
        *norm("transformer.ln_f", "model.norm", place="last"),
        *head(),
    ),
    pipeline=False,
    copies_kv_heads=False,
)
