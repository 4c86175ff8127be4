"""config.json of a TensorRT-LLM checkpoint, and the way back to a ModelShape.

TensorRT-LLM 0.16 to 1.2 accept unknown keys at the top level, but fail on unknown ones inside `mapping` and
`quantization`; only keys that all these versions know are written there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from lpxbuild import __version__
from lpxbuild.errors import SourceError
from lpxbuild.families import ModelShape, families
from lpxbuild.families.reading import positive_int
from lpxbuild.families.rope import long_rope_magnitude
from lpxbuild.quantization.scheme import Scheme

FORMAT_VERSION = 2
POSITIONS = {"rope": "rope_gpt_neox", "learned": "learned_absolute", "alibi": "alibi_with_scale"}
"""ModelShape.position → position_embedding_type; RoPE with factors that change with the length is "long_rope"."""
ACTIVATIONS = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh", "relu": "relu"}
"""ModelShape.hidden_act → hidden_act. TensorRT-LLM runs every gelu as the tanh approximation."""
GATED = {"silu": "swiglu", "gelu": "geglu", "gelu_tanh": "geglu"}
"""The same for layers whose mlp.fc holds both branches: fused MLPs and experts."""


def trtllm_config(
    shape: ModelShape,
    *,
    dtype: str,
    scheme: Scheme,
    quantization: Mapping[str, Any],
    tensor_parallel: int,
    pipeline_parallel: int,
    generation: Mapping[str, Any],
) -> dict[str, Any]:
    """The checkpoint's config.json.

    Args:
        shape: the model; `vocab_size` and `num_key_value_heads` stay the real ones, without padding and copies.
        dtype: element type of the checkpoint.
        scheme: what the checkpoint's linears have, written under `lpx` for the way back.
        quantization: the same in TensorRT-LLM's words.
        generation: what the layout has no field for (end_ids, pad_id, bos_id, source), written under `lpx`.
    """
    model = model_fields(shape, dtype)
    own = model.pop("lpx")
    return {
        "producer": {"name": "lpx", "version": __version__},
        **model,
        "mapping": {
            "world_size": tensor_parallel * pipeline_parallel,
            "tp_size": tensor_parallel,
            "pp_size": pipeline_parallel,
            "cp_size": 1,
            **({"moe_tp_size": tensor_parallel, "moe_ep_size": 1} if shape.moe else {}),
        },
        "quantization": dict(quantization),
        "lpx": {**own, "quantization_format": scheme.format, "scheme": scheme.as_dict(), **generation},
    }


def model_fields(shape: ModelShape, dtype: str) -> dict[str, Any]:
    """The fields that describe the model, and nothing of its splits and formats; `shape_from_config` reads them back.

    What TensorRT-LLM's checkpoint has no field for, and the embedded engine needs, lies under `lpx`.
    """
    return {
        "architecture": shape.architecture,
        "dtype": dtype,
        "logits_dtype": "float32",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_hidden_layers,
        "num_attention_heads": shape.num_attention_heads,
        "num_key_value_heads": shape.num_key_value_heads,
        "head_size": shape.head_size,
        "hidden_act": (GATED if shape.mlp == "fused" or shape.moe else ACTIVATIONS)[shape.hidden_act],
        "norm_epsilon": shape.norm_epsilon,
        "max_position_embeddings": shape.max_position_embeddings,
        **_positions(shape),
        "tie_word_embeddings": shape.tie_word_embeddings,
        # Embeddings are always split by vocabulary; with one rank this is the whole table.
        "use_parallel_embedding": True,
        "embedding_sharding_dim": 0,
        # True only for GPT variants; TensorRT-LLM's Qwen3 class turns its head norms on by itself.
        "qk_layernorm": False,
        **families()[shape.family].trtllm_fields(shape),
        "lpx": {
            "format_version": FORMAT_VERSION,
            "family": shape.family,
            "hidden_act": shape.hidden_act,
            **_dynamic(shape),
            "sliding_window": shape.sliding_window,
            "layer_types": list(shape.layer_types) if shape.layer_types is not None else None,
        },
    }


def _positions(shape: ModelShape) -> dict[str, Any]:
    fields: dict[str, Any] = {"position_embedding_type": POSITIONS[shape.position]}
    if shape.position != "rope":
        return fields
    fields["rotary_base"] = shape.rotary_base
    if shape.rotary_pct != 1:
        fields["rotary_pct"] = shape.rotary_pct
    scaling = shape.rotary_scaling
    if scaling is not None and scaling["rope_type"] == "longrope":
        return {
            **fields,
            "position_embedding_type": "long_rope",
            "rotary_scaling": None,
            "original_max_position_embeddings": scaling["original_max_position_embeddings"],
            "longrope_scaling_short_factors": scaling["short_factor"],
            "longrope_scaling_long_factors": scaling["long_factor"],
        }
    # TensorRT-LLM reads `type` first, then `rope_type`. Its "dynamic" is another kind: up to the model's length, null.
    if scaling is not None and scaling["rope_type"] == "dynamic":
        scaling = None
    fields["rotary_scaling"] = None if scaling is None else {"type": scaling["rope_type"], **scaling}
    return fields


def _dynamic(shape: ModelShape) -> dict[str, Any]:
    scaling = shape.rotary_scaling
    return {"dynamic_rope": dict(scaling)} if scaling is not None and scaling["rope_type"] == "dynamic" else {}


def _scaling(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The way back from `_positions`: ModelShape.rotary_scaling."""
    if config["position_embedding_type"] == "long_rope":
        original = positive_int(config, "original_max_position_embeddings")
        return {
            "rope_type": "longrope",
            "short_factor": list(config["longrope_scaling_short_factors"]),
            "long_factor": list(config["longrope_scaling_long_factors"]),
            "original_max_position_embeddings": original,
            "attention_factor": long_rope_magnitude(positive_int(config, "max_position_embeddings"), original),
        }
    if "dynamic_rope" in config["lpx"]:
        return dict(config["lpx"]["dynamic_rope"])
    scaling = config.get("rotary_scaling")
    return None if scaling is None else {key: scaling[key] for key in scaling if key != "type"}


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """The ModelShape that a config.json of lpx was written from; `dtype` is the checkpoint's.

    TensorRT-LLM's own fields are read wherever it has one, so that what is run here is what it would run.

    Raises:
        SourceError: not written by lpx, or by a version with another format.
    """
    lpx = config.get("lpx")
    if not isinstance(lpx, Mapping) or lpx.get("family") not in families():
        raise SourceError(
            "config.json of the checkpoint has no `lpx` entry of a known family",
            why="only checkpoints written by lpx can be read back",
            next="build the checkpoint with `lpx build RECIPE --to checkpoint`",
        )
    if lpx.get("format_version") != FORMAT_VERSION:
        raise SourceError(
            f"the checkpoint has format version {lpx.get('format_version')!r}",
            why=f"this version of lpx reads version {FORMAT_VERSION}",
            next="build the checkpoint again with `lpx build RECIPE --to checkpoint --force`",
        )
    family = families()[lpx["family"]]
    kind = "rope" if config["position_embedding_type"] == "long_rope" else config["position_embedding_type"]
    shape = family.plain(
        architecture=config["architecture"],
        hidden_size=positive_int(config, "hidden_size"),
        intermediate_size=positive_int(config, "intermediate_size"),
        num_hidden_layers=positive_int(config, "num_hidden_layers"),
        num_attention_heads=positive_int(config, "num_attention_heads"),
        num_key_value_heads=positive_int(config, "num_key_value_heads"),
        head_size=positive_int(config, "head_size"),
        vocab_size=positive_int(config, "vocab_size"),
        max_position_embeddings=positive_int(config, "max_position_embeddings"),
        norm_epsilon=config["norm_epsilon"],
        hidden_act=lpx["hidden_act"],
        position=next((ours for ours, theirs in POSITIONS.items() if theirs == kind), "rope"),
        rotary_base=config.get("rotary_base", 10000.0),
        rotary_pct=config.get("rotary_pct", 1.0),
        rotary_scaling=_scaling(config),
        tie_word_embeddings=config["tie_word_embeddings"],
        dtype=config["dtype"],
        sliding_window=lpx["sliding_window"],
        layer_types=None if lpx["layer_types"] is None else tuple(lpx["layer_types"]),
    )
    return replace(shape, **family.rebuild(config, shape))
