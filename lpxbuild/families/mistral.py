"""Mistral: Llama's layout without biases, with one sliding window for all layers (null = none)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lpxbuild.families.family import Family, Window
from lpxbuild.families.llama import llama_fields
from lpxbuild.families.reading import positive_int


def _window(config: Mapping[str, Any], _layers: int) -> Window:
    if config["sliding_window"] is None:
        return None, None
    return positive_int(config, "sliding_window"), None


FAMILY = Family(
    name="mistral",
    architectures=("MistralForCausalLM",),
    # transformers takes a window of 4096 where the key is absent; null switches it off.
    defaults={
        "max_position_embeddings": 131072,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4096,
    },
    window=_window,
    trtllm_fields=llama_fields,
)
