"""What the checkpoint tests share: random Hugging Face folders and a safetensors reader that are not lpx's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from lpxbuild.output import Output
from lpxbuild.source import Source, check

TYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}
NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
Tensors = dict[str, np.ndarray[Any, Any]]


def hf_tensors(config: dict[str, Any], *, seed: int = 0) -> Tensors:
    """Random float32 tensors for a config, by Hugging Face's names."""
    generator = np.random.default_rng(seed)
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    query, key_value = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    family = config["model_type"]
    attention_bias = family == "qwen2" or bool(config.get("attention_bias"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        linears = {
            "self_attn.q_proj": (query, hidden, attention_bias),
            "self_attn.k_proj": (key_value, hidden, attention_bias),
            "self_attn.v_proj": (key_value, hidden, attention_bias),
            "self_attn.o_proj": (hidden, query, attention_bias and family != "qwen2"),
            "mlp.gate_proj": (config["intermediate_size"], hidden, bool(config.get("mlp_bias"))),
            "mlp.up_proj": (config["intermediate_size"], hidden, bool(config.get("mlp_bias"))),
            "mlp.down_proj": (hidden, config["intermediate_size"], bool(config.get("mlp_bias"))),
        }
        for name, (rows, columns, bias) in linears.items():
            shapes[f"{prefix}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}{name}.bias"] = (rows,)
        shapes[f"{prefix}input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (hidden,)
        if family == "qwen3":
            shapes[f"{prefix}self_attn.q_norm.weight"] = (head,)
            shapes[f"{prefix}self_attn.k_norm.weight"] = (head,)
    shapes["model.norm.weight"] = (hidden,)
    if not config.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def config_for(family: str = "llama", **changes: Any) -> dict[str, Any]:
    architecture = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[family]
    return {
        "architectures": [f"{architecture}ForCausalLM"],
        "model_type": family,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "vocab_size": 77,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "sliding_window": None,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        **changes,
    }


def write_safetensors(path: Path, tensors: Tensors, *, padding: int = 0) -> None:
    """A safetensors file; `padding` spaces after the header's JSON move the data to any alignment."""
    header: dict[str, Any] = {}
    position = 0
    for name, tensor in tensors.items():
        kind = next(kind for kind, dtype in TYPES.items() if tensor.dtype == dtype)
        header[name] = {
            "dtype": kind,
            "shape": list(tensor.shape),
            "data_offsets": [position, position + tensor.nbytes],
        }
        position += tensor.nbytes
    text = json.dumps(header).encode() + b" " * padding
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            file.write(tensor.tobytes())


def read_safetensors(path: Path) -> Tensors:
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    tensors: Tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            tensors[name] = np.frombuffer(data[begin:end], TYPES[entry["dtype"]]).reshape(entry["shape"])
    return tensors


def write_source(folder: Path, config: dict[str, Any], tensors: Tensors, *, padding: int = 0) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_safetensors(folder / "model.safetensors", tensors, padding=padding)
    return folder


def checked(folder: Path, *, tensor_parallel: int = 1, pipeline_parallel: int = 1) -> Source:
    return check(
        folder,
        origin="tiny",
        need_tokenizer=False,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        output=Output.quiet(),
    )
