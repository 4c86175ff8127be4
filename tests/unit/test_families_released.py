"""Released models by the sizes of their configs: as many parameters as the hub counts in their files."""

from __future__ import annotations

import math
from typing import Any

import pytest

from lpxbuild.families import families

RELEASED: dict[str, tuple[str, dict[str, Any], int]] = {
    "openai-community/gpt2": ("gpt2", {"n_embd": 768, "n_layer": 12, "n_head": 12, "vocab_size": 50257}, 124_439_808),
    "google/gemma-2b": (
        "gemma",
        {
            "hidden_size": 2048,
            "intermediate_size": 16384,
            "num_hidden_layers": 18,
            "num_attention_heads": 8,
            "num_key_value_heads": 1,
            "vocab_size": 256000,
        },
        2_506_172_416,
    ),
    "google/gemma-2-2b": (
        "gemma2",
        {
            "hidden_size": 2304,
            "intermediate_size": 9216,
            "num_hidden_layers": 26,
            "num_attention_heads": 8,
            "vocab_size": 256000,
        },
        2_614_341_888,
    ),
    "google/gemma-3-1b-it": (
        "gemma3_text",
        {
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_hidden_layers": 26,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "vocab_size": 262144,
            "sliding_window": 512,
        },
        999_885_952,
    ),
    "microsoft/Phi-3-mini-4k-instruct": (
        "phi3",
        {
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "vocab_size": 32064,
        },
        3_821_079_552,
    ),
    "bigcode/starcoder2-3b": (
        "starcoder2",
        {
            "hidden_size": 3072,
            "intermediate_size": 12288,
            "num_hidden_layers": 30,
            "num_attention_heads": 24,
            "vocab_size": 49152,
        },
        3_030_371_328,
    ),
    "internlm/internlm2-7b": (
        "internlm2",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 92544,
            "bias": False,
        },
        7_737_708_544,
    ),
    "tiiuae/falcon-7b": (
        "falcon",
        {"hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "vocab_size": 65024},
        6_921_720_704,
    ),
    "ibm-granite/granite-3.0-2b-base": (
        "granite",
        {
            "hidden_size": 2048,
            "intermediate_size": 8192,
            "num_hidden_layers": 40,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 49155,
            "tie_word_embeddings": True,
        },
        2_533_531_648,
    ),
    "mistralai/Mixtral-8x7B-v0.1": (
        "mixtral",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 32000,
        },
        46_702_792_704,
    ),
    "Qwen/Qwen3-30B-A3B": (
        "qwen3_moe",
        {
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 48,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
        30_532_122_624,
    ),
    "Qwen/Qwen1.5-MoE-A2.7B": (
        "qwen2_moe",
        {
            "hidden_size": 2048,
            "intermediate_size": 5632,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "vocab_size": 151936,
        },
        14_315_784_192,
    ),
    "meta-llama/Llama-3.1-8B": (
        "llama",
        {
            "hidden_size": 4096,
            "intermediate_size": 14336,
            "num_hidden_layers": 32,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "vocab_size": 128256,
        },
        8_030_261_248,
    ),
    "Qwen/Qwen2.5-0.5B": (
        "qwen2",
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
        494_032_768,
    ),
}


@pytest.mark.parametrize("name", RELEASED)
def test_the_tensors_of_a_released_model_have_its_parameters(name: str) -> None:
    """A tied head counts once."""
    family, sizes, parameters = RELEASED[name]
    shape = families()[family].model_shape({**sizes, "model_type": family})
    tensors = families()[family].tensors(shape).values()
    assert sum(math.prod(tensor.shape) for tensor in tensors if tensor.required) == parameters
