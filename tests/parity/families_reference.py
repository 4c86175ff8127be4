"""Run by the reference interpreter: what transformers makes of configs (list on stdin, answers on stdout)."""

import json
import sys

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS


def first(holder, *names):
    return next((getattr(holder, name) for name in names if getattr(holder, name, None) is not None), None)


answers = []
for given in json.load(sys.stdin):
    config = AutoConfig.for_model(given["model_type"], **{k: v for k, v in given.items() if k != "model_type"})
    config.pad_token_id = None  # Phi-3's default lies beyond the small vocabulary
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    attention = next(module for module in model.modules() if type(module).__name__.endswith("Attention"))
    scaling = getattr(config, "rope_scaling", None) or {}
    scale = first(attention, "scaling", "inv_norm_factor")
    answer = {
        "head_size": attention.head_dim,
        "max_position_embeddings": config.max_position_embeddings,
        "norm_epsilon": first(config, "rms_norm_eps", "norm_epsilon", "layer_norm_epsilon"),
        "rotary_base": getattr(config, "rope_theta", 10000.0),
        "tie_word_embeddings": config.tie_word_embeddings,
        "sliding_window": getattr(config, "sliding_window", None),
        "layer_types": getattr(config, "layer_types", None),
        # GPT-2's attention has no such number: it divides by the root, or not at all.
        "attention_scale": scale or (attention.head_dim**-0.5 if config.scale_attn_weights else 1.0),
        "tensors": {name: list(tensor.shape) for name, tensor in model.state_dict().items()},
    }
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        answer["frequencies"], answer["attention_factor"] = frequencies.tolist(), factor
    if kind == "longrope":
        longest = ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=config.original_max_position_embeddings + 1)
        answer["long_frequencies"] = longest[0].tolist()
    answers.append(answer)
json.dump(answers, sys.stdout)
