"""config.json of a TensorRT-LLM checkpoint, and the way back to a ModelShape.

TensorRT-LLM 0.16 to 1.2 accept unknown keys at the top level, but fail on unknown ones inside `mapping` and
`quantization`; only keys that all these versions know are written there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lpxbuild import __version__
from lpxbuild.errors import SourceError
from lpxbuild.families import ModelShape, families
from lpxbuild.families.reading import positive_int
from lpxbuild.quantization import FORMATS, KV_CACHE

FORMAT_VERSION = 1


def trtllm_config(
    shape: ModelShape,
    *,
    dtype: str,
    quantization_format: str,
    kv_cache: str,
    tensor_parallel: int,
    pipeline_parallel: int,
    generation: Mapping[str, Any],
) -> dict[str, Any]:
    """The checkpoint's config.json.

    Args:
        shape: the model; `vocab_size` and `num_key_value_heads` stay the real ones, without padding and copies.
        dtype: element type of the checkpoint.
        generation: what the layout has no field for (end_ids, pad_id, bos_id, source), written under `lpx`.
    """
    scaling = None
    if shape.rotary_scaling is not None:
        # TensorRT-LLM reads `type` first, then `rope_type`.
        scaling = {"type": shape.rotary_scaling["rope_type"], **shape.rotary_scaling}
    return {
        "producer": {"name": "lpx", "version": __version__},
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
        "hidden_act": shape.hidden_act,
        "norm_epsilon": shape.norm_epsilon,
        "position_embedding_type": "rope_gpt_neox",
        "max_position_embeddings": shape.max_position_embeddings,
        "rotary_base": shape.rotary_base,
        "rotary_scaling": scaling,
        "tie_word_embeddings": shape.tie_word_embeddings,
        # Embeddings are always split by vocabulary; with one rank this is the whole table.
        "use_parallel_embedding": True,
        "embedding_sharding_dim": 0,
        # True only for GPT variants; TensorRT-LLM's Qwen3 class turns its head norms on by itself.
        "qk_layernorm": False,
        **families()[shape.family].trtllm_fields(shape),
        "mapping": {
            "world_size": tensor_parallel * pipeline_parallel,
            "tp_size": tensor_parallel,
            "pp_size": pipeline_parallel,
            "cp_size": 1,
        },
        "quantization": {
            "quant_algo": FORMATS[quantization_format].quant_algo,
            "kv_cache_quant_algo": KV_CACHE[kv_cache],
            # A list would replace TensorRT-LLM's defaults (lm_head, embeddings, routers); null keeps them.
            "exclude_modules": None,
        },
        "lpx": {
            "format_version": FORMAT_VERSION,
            "family": shape.family,
            "quantization_format": quantization_format,
            **generation,
            # TensorRT-LLM's checkpoint has no field for these; the embedded engine needs them.
            "sliding_window": shape.sliding_window,
            "layer_types": list(shape.layer_types) if shape.layer_types is not None else None,
        },
    }


def shape_from_config(config: Mapping[str, Any]) -> ModelShape:
    """The ModelShape that a config.json of lpx was written from; `dtype` is the checkpoint's.

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
    scaling = config["rotary_scaling"]
    return ModelShape(
        family=family.name,
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
        hidden_act=config["hidden_act"],
        rotary_base=config["rotary_base"],
        rotary_scaling=None if scaling is None else {key: scaling[key] for key in scaling if key != "type"},
        tie_word_embeddings=config["tie_word_embeddings"],
        dtype=config["dtype"],
        qkv_bias=config["attn_bias"],
        # In TensorRT-LLM's Llama class attn_bias covers the output projection; Qwen's has none there.
        dense_bias=config["attn_bias"] and family.dense_bias is not False,
        mlp_bias=config["mlp_bias"],
        qk_norm=family.qk_norm,
        sliding_window=lpx["sliding_window"],
        layer_types=None if lpx["layer_types"] is None else tuple(lpx["layer_types"]),
    )
