"""Small Hugging Face configs of the dense families, and variants that take every branch of their reading."""

from __future__ import annotations

from typing import Any

from lpxbuild.families import ModelShape, families, family_for

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 128,
    "torch_dtype": "bfloat16",
}
BASES: dict[str, dict[str, Any]] = {
    "gemma": {**SIZES, "num_key_value_heads": 2, "head_dim": 16},
    "gemma2": {**SIZES, "num_key_value_heads": 2, "head_dim": 16},
    "gemma3_text": {**SIZES, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8},
    "phi3": {**SIZES, "num_key_value_heads": 2},
    "gpt2": {"n_embd": 64, "n_layer": 4, "n_head": 4, "n_positions": 128, "vocab_size": 320, "dtype": "float32"},
    "starcoder2": {**SIZES, "num_key_value_heads": 2},
    "granite": {**SIZES, "num_key_value_heads": 2},
    "falcon": {key: value for key, value in SIZES.items() if key != "intermediate_size"},
    "internlm2": {**SIZES, "num_key_value_heads": 2, "bias": False},
}


def shape(family: str, **changes: Any) -> ModelShape:
    config = {"architectures": list(families()[family].architectures[:1]), "model_type": family, **BASES[family]}
    config = {key: value for key, value in {**config, **changes}.items() if value != "absent"}
    return family_for(config).model_shape(config)


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((family, {}) for family in BASES),
    ("gemma2", {"sliding_window": None, "attn_logit_softcapping": None, "query_pre_attn_scalar": 144}),
    ("gemma3_text", {"sliding_window_pattern": 2, "rope_local_base_freq": 5e3}),
    ("gemma3_text", {"layer_types": ["full_attention"] * 4}),
    ("phi3", {"partial_rotary_factor": 0.5, "sliding_window": 7}),
    ("gpt2", {"scale_attn_weights": False, "activation_function": "gelu", "n_inner": 96}),
    ("starcoder2", {"use_bias": False, "sliding_window": 9, "rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("granite", {"attention_multiplier": 0.0625, "logits_scaling": 8.0, "residual_multiplier": 0.22}),
    ("falcon", {"alibi": True, "parallel_attn": False, "multi_query": False, "bias": True}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}),
    ("internlm2", {"bias": True}),
    ("internlm2", {"rope_scaling": {"type": "dynamic", "factor": 2.0}}),
]
