"""Run by the reference interpreter: what transformers makes of configs (list on stdin, answers on stdout)."""

import json
import sys

import torch  # noqa: F401  (transformers' configs of RoPE need it)
from transformers import AutoConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

answers = []
for given in json.load(sys.stdin):
    config = AutoConfig.for_model(given["model_type"], **{k: v for k, v in given.items() if k != "model_type"})
    scaling = getattr(config, "rope_scaling", None) or {}
    answer = {
        "head_size": getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "max_position_embeddings": config.max_position_embeddings,
        "norm_epsilon": config.rms_norm_eps,
        "rotary_base": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "sliding_window": getattr(config, "sliding_window", None),
        "layer_types": getattr(config, "layer_types", None),
    }
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind != "default":
        frequencies, factor = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
        answer["frequencies"], answer["attention_factor"] = frequencies.tolist(), factor
    answers.append(answer)
json.dump(answers, sys.stdout)
