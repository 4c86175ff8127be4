"""Run by the reference interpreter: tiny random models, and what transformers computes with them in float32.

usage: tiny_models.py FOLDER [NAME …]   → FOLDER/<name>/ (a Hugging Face folder) with reference.npz inside:
ids [80], logits [80, vocabulary], prompt [24], greedy [32], log_probs [32] (of the greedy tokens). Of llama also
beams.json: [{length_penalty, early_stopping, sequences: [ids without the end id] best first}] with ends: the end ids.

Sizes fit every format's kernels with two ranks (multiples of 128, groups of 64 in each rank's share). A window of 8 is
a third of the prompt. internlm2 has no class in transformers: its reference is the Llama with the same weights.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
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

SIZES = {
    "vocab_size": 509,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
MIXED = {"use_sliding_window": True, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"] * 2}

IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "attn_implementation": "eager"}
GEMMA = {**SIZES, "vocab_size": 512, "head_dim": 32}  # TensorRT-LLM shares its vocabulary out without padding
GEMMA_SCALED = {**GEMMA, "query_pre_attn_scalar": 8, "sliding_window": 8}
FALCON = {
    "vocab_size": 509,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "ffn_hidden_size": 256,
    "max_position_embeddings": 256,
    **IDS,
}


def long_rope(original: int) -> dict[str, object]:
    """Six factors for the twelve dimensions of a head that turn."""
    factors = {"short_factor": [1.0, 1.1, 1.2, 1.4, 1.7, 2.0], "long_factor": [1.5, 2.0, 3.0, 4.0, 6.0, 9.0]}
    return {"original_max_position_embeddings": original, "rope_scaling": {"type": "longrope", **factors}}


MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mistral": lambda: MistralForCausalLM(MistralConfig(sliding_window=8, **SIZES)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SIZES)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(head_dim=32, **SIZES)),
    "llama_biases_rope_llama3": lambda: LlamaForCausalLM(
        LlamaConfig(attention_bias=True, mlp_bias=True, rope_scaling=LLAMA3, **SIZES)
    ),
    "llama_tied_rope_yarn": lambda: LlamaForCausalLM(LlamaConfig(tie_word_embeddings=True, rope_scaling=YARN, **SIZES)),
    "qwen2_mixed_layers": lambda: Qwen2ForCausalLM(Qwen2Config(**MIXED, **SIZES)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**GEMMA)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(attn_logit_softcapping=5.0, final_logit_softcapping=8.0, **GEMMA_SCALED)
    ),
    "gemma3_text": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(sliding_window_pattern=2, rope_theta=1e6, rope_local_base_freq=1e3, **GEMMA_SCALED)
    ),
    "phi3": lambda: Phi3ForCausalLM(Phi3Config(partial_rotary_factor=0.75, **long_rope(128), **SIZES)),
    "phi3_long_rope": lambda: Phi3ForCausalLM(Phi3Config(partial_rotary_factor=0.75, **long_rope(16), **SIZES)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_positions=256, n_embd=128, n_layer=4, n_head=8, n_inner=256, vocab_size=509, **IDS)
    ),
    "starcoder2": lambda: Starcoder2ForCausalLM(Starcoder2Config(sliding_window=8, **SIZES)),
    "granite": lambda: GraniteForCausalLM(
        GraniteConfig(
            attention_multiplier=0.4, embedding_multiplier=3.0, residual_multiplier=0.7, logits_scaling=0.5, **SIZES
        )
    ),
    "falcon": lambda: FalconForCausalLM(FalconConfig(**FALCON)),
    "falcon_new": lambda: FalconForCausalLM(
        FalconConfig(new_decoder_architecture=True, num_kv_heads=4, tie_word_embeddings=False, **FALCON)
    ),
    "falcon_rw": lambda: FalconForCausalLM(
        # Falcon's eager attention adds ALiBi's bias twice (in the mask and to the scores); sdpa, the default, once.
        FalconConfig(
            alibi=True, parallel_attn=False, multi_query=False, bias=True, **{**FALCON, "attn_implementation": "sdpa"}
        )
    ),
    "internlm2": lambda: LlamaForCausalLM(LlamaConfig(**SIZES)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(num_local_experts=4, **SIZES)),
    "qwen2_moe": lambda: Qwen2MoeForCausalLM(
        Qwen2MoeConfig(
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=128,
            shared_expert_intermediate_size=256,
            mlp_only_layers=[1],
            **SIZES,
        )
    ),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            num_experts=4, num_experts_per_tok=2, moe_intermediate_size=128, norm_topk_prob=True, head_dim=32, **SIZES
        )
    ),
}


BEAMS, BEAM_TOKENS = 4, 12


def beams(model: torch.nn.Module, prompt: torch.Tensor) -> dict[str, object]:
    """Beam searches in which many ids end a sequence, so that lengths differ and both settings matter."""
    ends = list(range(3, SIZES["vocab_size"], 9))
    searches = []
    for early_stopping in (True, False):
        for length_penalty in (-1.0, 0.0, 1.0, 3.0):
            found = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=BEAM_TOKENS,
                do_sample=False,
                num_beams=BEAMS,
                num_return_sequences=BEAMS,
                length_penalty=length_penalty,
                early_stopping=early_stopping,
                eos_token_id=ends,
                pad_token_id=0,
            )[:, prompt.shape[1] :].tolist()
            cut = [next((i for i, token in enumerate(row) if token in ends), len(row)) for row in found]
            sequences = [row[:length] for row, length in zip(found, cut)]
            searches.append(
                {"length_penalty": length_penalty, "early_stopping": early_stopping, "sequences": sequences}
            )
    return {"ends": ends, "searches": searches}


def save_as_internlm2(model: torch.nn.Module, folder: Path) -> None:
    """The Llama under InternLM2's names: wqkv holds the query heads, the key and the value of each KV head."""
    config = model.config
    size, groups = config.hidden_size // config.num_attention_heads, config.num_key_value_heads
    state, renamed = model.state_dict(), {}
    for name, tensor in state.items():
        for old, new in (
            ("embed_tokens", "tok_embeddings"),
            ("lm_head", "output"),
            ("self_attn.o_proj", "attention.wo"),
            ("mlp.gate_proj", "feed_forward.w1"),
            ("mlp.up_proj", "feed_forward.w3"),
            ("mlp.down_proj", "feed_forward.w2"),
            ("input_layernorm", "attention_norm"),
            ("post_attention_layernorm", "ffn_norm"),
        ):
            name = name.replace(old, new)
        if "self_attn" not in name:
            renamed[name] = tensor.contiguous()
    for layer in range(config.num_hidden_layers):
        parts = [
            state[f"model.layers.{layer}.self_attn.{part}_proj.weight"].reshape(groups, -1, size, config.hidden_size)
            for part in "qkv"
        ]
        wqkv = torch.cat(parts, 1).reshape(-1, config.hidden_size)
        renamed[f"model.layers.{layer}.attention.wqkv.weight"] = wqkv.contiguous()
    folder.mkdir(parents=True)
    save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})
    described = {**config.to_dict(), "architectures": ["InternLM2ForCausalLM"], "model_type": "internlm2"}
    dynamic = {"bias": False, "rope_scaling": {"type": "dynamic", "factor": 2.0}, "dtype": "float32"}
    (folder / "config.json").write_text(json.dumps({**described, **dynamic}))


def main(folder: Path, wanted: list[str]) -> None:
    torch.set_num_threads(1)  # matrices this small only wait for each other
    for seed, (name, make) in enumerate(MODELS.items()):
        if wanted and name not in wanted:
            continue
        torch.manual_seed(seed)
        model = make().eval()
        # Larger than the usual initialisation: attention must matter, and the two best logits must lie apart.
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(0, 0.08)
            else:
                parameter.data.add_(torch.randn_like(parameter) * 0.2)
        ids = torch.randint(3, SIZES["vocab_size"], (1, 80))
        prompt = ids[:, :24]
        with torch.no_grad():
            logits = model(ids).logits[0]
            greedy = model.generate(
                prompt,
                attention_mask=torch.ones_like(prompt),
                max_new_tokens=32,
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
                output_logits=True,
                return_dict_in_generate=True,
            )
        tokens = greedy.sequences[0, 24:]
        log_probs = torch.log_softmax(torch.stack([step[0] for step in greedy.logits]).double(), -1)
        if name == "internlm2":
            save_as_internlm2(model, folder / name)
        else:
            model.save_pretrained(folder / name)
        if name == "llama":
            with torch.no_grad():
                (folder / name / "beams.json").write_text(json.dumps(beams(model, prompt)))
        np.savez(
            folder / name / "reference.npz",
            ids=ids[0].numpy(),
            logits=logits.numpy(),
            prompt=prompt[0].numpy(),
            greedy=tokens.numpy(),
            log_probs=log_probs[torch.arange(32), tokens].numpy(),
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
