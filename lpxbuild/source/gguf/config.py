"""config.json and generation_config.json of a GGUF model, in the words of transformers 4."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lpxbuild.source.gguf.architectures import architecture_of

if TYPE_CHECKING:
    from lpxbuild.source.gguf.metadata import Metadata
    from lpxbuild.source.gguf.weights import WeightPlan


def model_config(metadata: Metadata, plan: WeightPlan) -> dict[str, Any]:
    """config.json of the model."""
    architecture = architecture_of(metadata)
    heads = metadata.size(metadata.key("attention.head_count"))
    config: dict[str, Any] = {
        "architectures": [architecture.hf_architecture],
        "model_type": architecture.model_type,
        "hidden_size": metadata.size(metadata.key("embedding_length")),
        "intermediate_size": metadata.size(metadata.key("feed_forward_length")),
        "num_hidden_layers": metadata.size(metadata.key("block_count")),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.size(metadata.key("attention.head_count_kv"), heads),
        "max_position_embeddings": metadata.size(metadata.key("context_length")),
        "rms_norm_eps": metadata.number(metadata.key("attention.layer_norm_rms_epsilon")),
        "rope_theta": metadata.number(metadata.key("rope.freq_base"), 10000.0),
        "vocab_size": plan.vocab_size,
        "tie_word_embeddings": plan.tied,
        "torch_dtype": plan.dtype,
        "use_cache": True,
        **architecture.config(metadata, plan),
    }
    for key, id_ in (("bos", metadata.id("bos")), ("eos", metadata.id("eos")), ("pad", metadata.id("padding"))):
        if id_ is not None:
            config[f"{key}_token_id"] = id_
    return config


def generation_config(metadata: Metadata) -> dict[str, Any]:
    """generation_config.json: end of text and end of turn both end a generation."""
    ends = [id_ for name in ("eos", "eot", "eom") if (id_ := metadata.id(name)) is not None]
    unique = list(dict.fromkeys(ends))
    config: dict[str, Any] = {}
    if (bos := metadata.id("bos")) is not None:
        config["bos_token_id"] = bos
    if unique:
        config["eos_token_id"] = unique[0] if len(unique) == 1 else unique
    if (pad := metadata.id("padding")) is not None:
        config["pad_token_id"] = pad
    return config
