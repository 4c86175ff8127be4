"""A tiny random llama as a Hugging Face folder, made with numpy, and the way from it to a repository."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

HERE = Path(__file__).parent
CASES = HERE.parent / "cases" / "data"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}


@dataclass(frozen=True)
class Limits:
    max_batch_size: int = 8
    max_input_len: int = 96
    max_seq_len: int = 320
    max_num_tokens: int = 128
    max_beam_width: int = 1


@dataclass(frozen=True)
class Runtime:
    precision: str = "exact"
    threads: int | None = 1
    kv_cache_bytes: int = 32 << 20
    enable_kv_cache_reuse: bool = True
    enable_chunked_context: bool = True


def make_source(folder: Path, *, seed: int = 5, tokenizer: str = "baseline", **changes: Any) -> Path:
    """Write config.json, model.safetensors and the tokenizer of one of the cases."""
    config = CONFIG | changes
    random = np.random.default_rng(seed)
    hidden, middle, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    shapes = {"model.embed_tokens": (config["vocab_size"], hidden), "lm_head": (config["vocab_size"], hidden)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes |= {
            f"{prefix}self_attn.q_proj": (queries, hidden),
            f"{prefix}self_attn.k_proj": (keys, hidden),
            f"{prefix}self_attn.v_proj": (keys, hidden),
            f"{prefix}self_attn.o_proj": (hidden, queries),
            f"{prefix}mlp.gate_proj": (middle, hidden),
            f"{prefix}mlp.up_proj": (middle, hidden),
            f"{prefix}mlp.down_proj": (hidden, middle),
            f"{prefix}input_layernorm": (hidden,),
            f"{prefix}post_attention_layernorm": (hidden,),
        }
    shapes["model.norm"] = (hidden,)
    weights = {}
    for name, shape in shapes.items():
        noise = random.standard_normal(shape)
        weights[f"{name}.weight"] = (noise * 0.3 if len(shape) > 1 else 1 + noise * 0.2).astype(np.float32)
    folder.mkdir(parents=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    for name in TOKENIZER_FILES:
        shutil.copy(CASES / tokenizer / name, folder / name)
    return folder


def build_engine(
    source_folder: Path,
    place: Path,
    *,
    tensor: int = 1,
    pipeline: int = 1,
    runtime: Runtime = Runtime(),  # noqa: B008  frozen
    dtype: str = "float32",
    quantization: str = "none",
    **limits: int,
) -> Path:
    """Source folder → engine folder; format none, float32 and exact unless said."""
    from lpxbuild import checkpoint, engine, source
    from lpxbuild.output import Output
    from lpxbuild.quantization.scheme import Scheme

    output = Output.quiet()
    checked = source.check(
        source_folder, origin="tiny", tensor_parallel=tensor, pipeline_parallel=pipeline, output=output
    )
    for name in ("checkpoint", "engine"):
        (place / name).mkdir(parents=True)
    checkpoint.convert(
        checked,
        place / "checkpoint",
        dtype=dtype,
        scheme=Scheme(quantization),
        tensor_parallel=tensor,
        pipeline_parallel=pipeline,
        output=output,
    )
    engine.compile_engine(
        "openvino", place / "checkpoint", place / "engine", limits=Limits(**limits), runtime=runtime, output=output
    )
    return place / "engine"


def build_repository(engine: Path, repository: Path, **settings: Any) -> Path:
    """Engine folder → repository."""
    from lpxbuild.output import Output
    from lpxbuild.repository import RepositorySettings, render

    repository.mkdir(parents=True)
    render(engine, repository, RepositorySettings(**settings), output=Output.quiet())
    return repository


def make_replay(repository: Path, scripts: dict[int, list[int]], *, delay: float = 0.0, at_once: int = 8) -> Path:
    """Let the engine host of a repository emit scripted ids, by the last id of the prompt."""
    version = repository / "tensorrt_llm" / "1"
    for place, content in (
        (version / "engine_executor_paged.py", (HERE / "replay_executor.py").read_text()),
        (version / "engine" / "replay.json", json.dumps({"scripts": scripts, "delay": delay, "at_once": at_once})),
    ):
        place.unlink(missing_ok=True)
        place.write_text(content)
    return repository
