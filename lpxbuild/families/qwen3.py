"""Qwen3 (dense): no biases, a norm on each query and key head; head_dim is 128 unless given."""

from __future__ import annotations

from lpxbuild.families.family import Family
from lpxbuild.families.qwen2 import biases_of_qwen, qwen_fields, qwen_window

FAMILY = Family(
    name="qwen3",
    architectures=("Qwen3ForCausalLM",),
    attention=("sliding_window", "mixed_layers"),
    defaults={
        "num_key_value_heads": 32,
        "max_position_embeddings": 32768,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "head_dim": 128,
        "sliding_window": 4096,
    },
    qk_norm=True,
    # TensorRT-LLM sets attn_bias false for qwen3 whatever the config says.
    unrepresentable=("attention_bias",),
    window=qwen_window,
    trtllm_fields=qwen_fields,
    rebuild=biases_of_qwen,
)
