"""Mistral: Llama's layout without biases, with one sliding window for all layers (null = none)."""

from __future__ import annotations

from lpxbuild.families.family import Family
from lpxbuild.families.llama import biases_of_llama, llama_fields
from lpxbuild.families.window import one_window

FAMILY = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    attention=("sliding_window",),
    checked_against="oracle, transformers' logits",
    # transformers takes a window of 4096 where the key is absent; null switches it off.
    defaults={
        "num_key_value_heads": 8,
        "max_position_embeddings": 131072,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    },
    window=one_window,
    trtllm_fields=llama_fields,
    rebuild=biases_of_llama,
)
