"""Run by the reference interpreter: a tiny model of every family, and its logits with the weights of every format.

usage: matrix_models.py FOLDER → FOLDER/<family>/ (a Hugging Face folder in bfloat16) with
  factors.npz   module → factors of its input, for the formats that smooth (powers of two: dividing by them is exact)
  logits.npz    ids [24], and for each format its logits [24, vocabulary] in float32; of the weight-only formats, whose
                ranks round by themselves, one for each number of ranks: "int8_wo-2"

Sizes obey every kernel rule of TensorRT-LLM with one and two ranks. Weights are quantized and dequantized here, module
by module, from the definitions of the formats; nothing of lpx takes part.
"""

from __future__ import annotations

import copy
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from tiny_models import save_as_internlm2
from transformers import (
    FalconConfig,
    FalconForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

LAYERS, TOKENS, GROUP = 2, 24, 128
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "attn_implementation": "eager"}
SIZES = {
    "vocab_size": 320,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    **IDS,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256}
GEMMA = {**SIZES, "head_dim": 32}
FALCON = {
    "vocab_size": 320,
    "hidden_size": 256,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "ffn_hidden_size": 512,
    "max_position_embeddings": 64,
    **IDS,
}
MODELS = {
    "falcon": lambda: FalconForCausalLM(FalconConfig(new_decoder_architecture=True, num_kv_heads=4, **FALCON)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**GEMMA)),
    "gemma2": lambda: Gemma2ForCausalLM(Gemma2Config(query_pre_attn_scalar=32, **GEMMA)),
    # Two layers of a pattern of six: both have the window.
    "gemma3_text": lambda: Gemma3ForCausalLM(Gemma3TextConfig(query_pre_attn_scalar=32, **GEMMA)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_positions=64, n_embd=256, n_layer=LAYERS, n_head=8, n_inner=512, vocab_size=320, **IDS)
    ),
    "granite": lambda: GraniteForCausalLM(GraniteConfig(residual_multiplier=0.7, logits_scaling=0.5, **SIZES)),
    "internlm2": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**SIZES)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(num_local_experts=4, **SIZES)),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(original_max_position_embeddings=64, **SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen2_moe": lambda: Qwen2MoeForCausalLM(Qwen2MoeConfig(shared_expert_intermediate_size=512, **EXPERTS, **SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(head_dim=32, **SIZES)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(Qwen3MoeConfig(head_dim=32, norm_topk_prob=True, **EXPERTS, **SIZES)),
    "starcoder2": lambda: Starcoder2ForCausalLM(Starcoder2Config(**SIZES)),
}
# Ends of the names of linears: what reads the layer's input, the attention's answer, the MLP's input, its inside.
QKV = ("q_proj", "k_proj", "v_proj", "qkv_proj", "attn.c_attn", "query_key_value")
OUT = ("o_proj", "attn.c_proj", "self_attention.dense")
UP = ("gate_proj", "up_proj", "gate_up_proj", "c_fc", "dense_h_to_4h", ".w1", ".w3")
DOWN = ("down_proj", "mlp.c_proj", "dense_4h_to_h", ".w2")
ROLES = (("qkv", QKV), ("out", OUT), ("up", UP), ("down", DOWN))
FORMATS = ("none", "int4_rtn", "int4_awq", "w4a8_awq", "int8_sq", "fp8", "fp8_pc_pt", "nvfp4")
WEIGHT_ONLY = {"int8_wo": 8, "int4_wo": 4}
SMOOTHED = ("int4_awq", "w4a8_awq", "int8_sq")


def linears(model: torch.nn.Module) -> Iterator[tuple[str, str, torch.nn.Module]]:
    """(name, role, module) of every linear of the layers that a format changes."""
    for name, module in model.named_modules():
        role = next((role for role, ends in ROLES if name.endswith(ends)), None)
        if role and getattr(module, "weight", None) is not None:
            yield name, role, module


def factors_of(name: str, role: str, size: int) -> np.ndarray:
    """One number for each input feature; what reads the same input has the same."""
    layer = next(word for word in name.split(".") if word.isdigit())
    shared = "shared" if "shared_expert" in name and role == "down" else ""
    random = np.random.default_rng(zlib.crc32(f"{layer} {role} {shared}".encode()))
    return (2.0 ** random.integers(-1, 2, size)).astype(np.float32)


def sharing(name: str, role: str) -> str:
    """Linears with one answer share the scale of a whole weight: q, k and v; gate and up of an MLP or an expert."""
    return f"{name.rpartition('.')[0]} {role}"


def rounded(values: torch.Tensor) -> torch.Tensor:
    """To the nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6; halfway to the one with an even code."""
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    middles = (levels[1:] + levels[:-1]) / 2
    size = values.abs()
    codes = torch.zeros(size.shape, dtype=torch.long)
    for code, middle in enumerate(middles.tolist()):
        codes += (size >= middle) if code % 2 else (size > middle)
    return levels[codes].copysign(values)


def blocks(weight: torch.Tensor, size: int) -> torch.Tensor:
    return weight.reshape(weight.shape[0], -1, size)


def dequantized(format_: str, weight: torch.Tensor, largest: torch.Tensor) -> torch.Tensor:
    """(out, in) as the format keeps it. `largest`: magnitude of everything that shares the weight's scale."""
    if format_ in ("int4_rtn", "int4_awq", "w4a8_awq"):
        grouped = blocks(weight, GROUP)
        scale = grouped.abs().amax(-1, keepdim=True) / 7
        return ((grouped / scale).round().clamp(-8, 7) * scale).reshape(weight.shape)
    if format_ == "int8_sq":
        scale = weight.abs().amax(-1, keepdim=True) / 127
        return (weight / scale).round().clamp(-128, 127) * scale
    if format_ == "fp8":
        return (weight / (largest / 448)).to(torch.float8_e4m3fn).float() * (largest / 448)
    if format_ == "fp8_pc_pt":
        scale = (weight.abs().amax(-1, keepdim=True) / 448).clamp(min=1 / (448 * 512))
        return (weight / scale).to(torch.float8_e4m3fn).float() * scale
    if format_ == "nvfp4":
        whole, grouped = largest / (6 * 448), blocks(weight, 16)
        scale = (grouped.abs().amax(-1, keepdim=True) / (6 * whole)).clamp(2**-9, 448).to(torch.float8_e4m3fn).float()
        return (rounded(grouped / (scale * whole)) * (scale * whole)).reshape(weight.shape)
    return weight


def weight_only(weight: torch.Tensor, bits: int, parts: int) -> torch.Tensor:
    """TensorRT-LLM's rounding per row of what each of `parts` ranks holds; the scale is applied in bfloat16."""
    limit = 2 ** (bits - 1)
    cut = blocks(weight, weight.shape[1] // parts)
    scale = cut.abs().amax(-1, keepdim=True) / limit
    ratio = cut / scale
    away = torch.where(ratio - ratio.trunc() >= 0.5, 1.0, 0.0) - torch.where(ratio - ratio.trunc() <= -0.5, 1.0, 0.0)
    return ((ratio.trunc() + away).clamp(-limit, limit - 1) * scale.bfloat16().float()).reshape(weight.shape)


def set_weights(model: torch.nn.Module, plain: dict[str, torch.Tensor], format_: str, ranks: int = 1) -> None:
    transposed = model.config.model_type == "gpt2"  # Conv1D keeps (in, out)
    smoothed, largest = {}, {}
    for name, role, _module in linears(model):
        weight = plain[name].T if transposed else plain[name]
        factors = torch.from_numpy(factors_of(name, role, weight.shape[1]))
        smoothed[name] = (weight / factors, factors) if format_ in SMOOTHED else (weight, torch.ones(()))
        group = sharing(name, role)
        largest[group] = torch.maximum(largest.get(group, torch.zeros(())), smoothed[name][0].abs().max())
    for name, role, module in linears(model):
        weight, factors = smoothed[name]
        if format_ in WEIGHT_ONLY:
            result = weight_only(weight, WEIGHT_ONLY[format_], ranks if role in ("out", "down") else 1)
        else:
            result = dequantized(format_, weight, largest[sharing(name, role)]) * factors
        module.weight.data.copy_(result.T if transposed else result)


def saved_names(family: str, name: str) -> list[str]:
    """The modules of the saved files that a linear is found under."""
    if family != "internlm2":
        return [name]
    layer = name.split(".")[2]
    renamed = {"o_proj": "attention.wo", "gate_proj": "feed_forward.w1", "up_proj": "feed_forward.w3"}
    renamed |= {"down_proj": "feed_forward.w2", **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "attention.wqkv")}
    return [f"model.layers.{layer}.{renamed[name.rpartition('.')[2]]}"]


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    ids = torch.arange(TOKENS)[None] * 13 % 300 + 3
    for seed, (family, make) in enumerate(MODELS.items()):
        torch.manual_seed(seed)
        model = make().eval()
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(0, 0.06)
            elif family.startswith("gemma"):
                # Checkpoints hold one plus the weight in bfloat16: these have no digits to lose there.
                parameter.data.copy_(torch.randint(-32, 32, parameter.shape) / 128)
            else:
                parameter.data.add_(torch.randn_like(parameter) * 0.2)
            parameter.data.copy_(parameter.data.bfloat16())
        plain = {name: module.weight.data.clone() for name, _role, module in linears(model)}
        stored = copy.deepcopy(model).bfloat16()  # of the model itself that would round RoPE's frequencies too
        if family == "internlm2":
            save_as_internlm2(stored, folder / family)
        else:
            stored.save_pretrained(folder / family)
        answers = {"ids": ids[0].numpy()}
        cells = [(name, 1) for name in FORMATS] + [(name, ranks) for name in WEIGHT_ONLY for ranks in (1, 2)]
        for format_, ranks in cells:
            set_weights(model, plain, format_, ranks)
            with torch.inference_mode():
                key = f"{format_}-{ranks}" if format_ in WEIGHT_ONLY else format_
                answers[key] = model(ids).logits[0].numpy()
        np.savez(folder / family / "logits.npz", **answers)
        factors = {
            saved: factors_of(name, role, plain[name].shape[0 if family == "gpt2" else 1])
            for name, role, _module in linears(model)
            for saved in saved_names(family, name)
        }
        np.savez(folder / family / "factors.npz", **factors)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
