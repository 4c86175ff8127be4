"""Run by the reference interpreter: tiny random models, and what transformers computes with them in float32.

usage: tiny_models.py FOLDER   → FOLDER/<name>/ (a Hugging Face folder) with reference.npz inside:
ids [80], logits [80, vocabulary], prompt [24], greedy [32], log_probs [32] (of the greedy tokens). Of llama also
beams.json: [{length_penalty, early_stopping, sequences: [ids without the end id] best first}] with ends: the end ids.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
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


def main(folder: Path) -> None:
    torch.set_num_threads(2)
    for seed, (name, make) in enumerate(MODELS.items()):
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
    main(Path(sys.argv[1]))
