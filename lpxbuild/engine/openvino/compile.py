"""Writes the engine folder: engine.json, the OpenVINO model, what GenAI reads beside it, and the tokenizer."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from importlib import metadata
from pathlib import Path
from typing import Any

import lpxbuild
from lpxbuild import checkpoint as checkpoints
from lpxbuild.engine import EngineReport, Limits, Runtime, check_features, check_positions
from lpxbuild.engine.openvino.graph import DecoderGraph
from lpxbuild.engine.openvino.weights import MergedWeights
from lpxbuild.errors import HostError, RecipeError
from lpxbuild.families import ModelShape, attention_features
from lpxbuild.output import Output

KV_BLOCK_TOKENS = 32  # of OpenVINO GenAI's paged cache on a CPU

# `exact`: float32 in every product and in the cache; weights are the checkpoint's values (or TensorRT-LLM's
# dequantized ones). OpenVINO would otherwise choose bfloat16 products, a uint8 cache and activations quantized in
# groups of 32.
# `fast`, for serving: int8 weights, and activations quantized in groups of 32 where the CPU has instructions for it
# (AVX-512 VNNI; without them the setting changes nothing). bfloat16 was left out: on AVX2 it runs as float32 and the
# paged kernel refuses a bfloat16 cache. A uint8 cache was no faster than float32 beyond noise at short contexts.
# benchmarks/engine.py measures it against transformers.
_PROPERTIES: dict[str, dict[str, str | int]] = {
    "exact": {
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    },
    "fast": {
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 32,
    },
}


def compile_engine(
    checkpoint: Path, destination: Path, *, limits: Limits, runtime: Runtime, output: Output
) -> EngineReport:
    """See `lpxbuild.engine.compile_engine`."""
    versions = _versions()
    reader = checkpoints.read(checkpoint)
    config = reader.config
    shape = reader.shape
    features = attention_features(shape, limits.max_seq_len)
    executor = check_features(features, "openvino")
    check_positions(shape, limits.max_seq_len)
    blocks = _kv_blocks(shape, limits, runtime)
    _notice_positions(shape, limits, output)
    _notice_kv_cache(config, output)

    output.step("engine: building the OpenVINO graph")
    graph = DecoderGraph(MergedWeights(reader, destination), int8=runtime.precision == "fast")
    model = graph.model()
    _save(model, destination / "openvino_model.xml")
    forms = graph.forms
    del model, graph

    extra = config["lpx"]
    properties = dict(_PROPERTIES[runtime.precision])
    if runtime.threads is not None:
        properties["INFERENCE_NUM_THREADS"] = runtime.threads
    engine = {
        "format_version": 1,
        "backend": "openvino",
        "executor": executor,
        "attention_features": list(features),
        "precision": runtime.precision,
        "properties": properties,
        "weights": forms,
        "activations": "float32",
        "kv_cache": "float32",
        "scheduler": _scheduler(executor, shape, blocks, limits, runtime),
        "limits": {
            "max_batch_size": limits.max_batch_size,
            "max_input_len": limits.max_input_len,
            "max_seq_len": limits.max_seq_len,
            "max_beam_width": limits.max_beam_width,
            "max_num_tokens": limits.max_num_tokens,
        },
        "vocab_size": shape.vocab_size,
        "end_ids": extra["end_ids"],
        "pad_id": extra["pad_id"],
        "bos_id": extra["bos_id"],
        "checkpoint": {path.name: _sha256(path) for path in sorted(checkpoint.glob("rank*.safetensors"))},
        "versions": versions,
    }
    _write_json(destination / "engine.json", engine)
    _write_json(destination / "config.json", {"model_type": extra["family"]})
    _write_json(
        destination / "generation_config.json",
        {"eos_token_id": extra["end_ids"], "bos_token_id": extra["bos_id"], "pad_token_id": extra["pad_id"]},
    )
    if (checkpoint / "tokenizer").is_dir():
        shutil.copytree(checkpoint / "tokenizer", destination / "tokenizer")
    weight_bytes = (destination / "openvino_model.bin").stat().st_size
    cache = f"{blocks} KV blocks, " if executor == "paged" else ""
    output.step(f"engine: {weight_bytes / 1e6:.0f} MB of weights, {cache}executor {executor}")
    return EngineReport(
        executor=executor,
        precision=runtime.precision,
        weight_bytes=weight_bytes,
        kv_blocks=blocks if executor == "paged" else 0,
        attention_features=features,
        weights=forms,
    )


def _scheduler(executor: str, shape: ModelShape, blocks: int, limits: Limits, runtime: Runtime) -> dict[str, Any]:
    if executor == "stateful":
        # One request at a time; its keys and values are the graph's state and grow with it.
        longest = limits.max_seq_len * limits.max_beam_width
        return {"cache_size_bytes": longest * _token_bytes(shape)}
    return {
        "cache_size_bytes": runtime.kv_cache_bytes,
        "num_kv_blocks": blocks,
        "max_num_batched_tokens": limits.max_num_tokens,
        "max_num_seqs": limits.max_batch_size,
        "dynamic_split_fuse": runtime.enable_chunked_context,
        "enable_prefix_caching": runtime.enable_kv_cache_reuse,
    }


def _token_bytes(shape: ModelShape) -> int:
    """Keys and values of one token in every layer, in float32."""
    return 2 * shape.num_hidden_layers * shape.num_key_value_heads * shape.head_size * 4


def _kv_blocks(shape: ModelShape, limits: Limits, runtime: Runtime) -> int:
    """Blocks of 32 tokens that fit into the cache; the stateful executor, which has no blocks, needs the same room."""
    block = _token_bytes(shape) * KV_BLOCK_TOKENS
    blocks = runtime.kv_cache_bytes // block
    # GenAI ends a request without a word when its blocks run out, so one request of full length must fit.
    needed = -(-limits.max_seq_len // KV_BLOCK_TOKENS) * limits.max_beam_width + 1
    if blocks < needed:
        enough = _rounded_up(needed * block / 2**30)
        raise RecipeError(
            f"the KV cache of {runtime.kv_cache_bytes / 2**30:.2g} GiB holds {blocks * KV_BLOCK_TOKENS} tokens, "
            f"fewer than one request of max_seq_len {limits.max_seq_len} with {limits.max_beam_width} beam(s)",
            why=f"{KV_BLOCK_TOKENS} tokens take {block / 1e6:.1f} MB in this model",
            next=f"set runtime.kv_cache_gib to at least {enough:g}, or lower limits.max_seq_len",
        )
    return blocks


def _rounded_up(value: float) -> float:
    """Two significant digits, never less than the value."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit) * unit:.2g}")


def _notice_positions(shape: ModelShape, limits: Limits, output: Output) -> None:
    scaling = shape.rotary_scaling or {}
    trained = shape.max_position_embeddings
    if limits.max_seq_len <= trained:
        return
    if scaling.get("rope_type") != "yarn" or limits.max_seq_len > trained * scaling["factor"]:
        output.notice(
            f"limits.max_seq_len {limits.max_seq_len} is beyond the model's max_position_embeddings {trained}; "
            f"answers beyond position {trained} are not what the model was trained for"
        )


def _notice_kv_cache(config: dict[str, Any], output: Output) -> None:
    stored = config["quantization"].get("kv_cache_quant_algo")
    if stored is not None:
        output.notice(
            f"the embedded engine keeps its KV cache in float32; the checkpoint's {stored} scales of keys and values "
            "are for backend tensorrt"
        )


def _save(model: Any, path: Path) -> None:
    import openvino as ov

    # OpenVINO numbers nameless nodes over the life of the process; fixed names make equal bytes of equal models.
    for index, node in enumerate(model.get_ordered_ops()):
        if node.get_type_name() not in ("Parameter", "Result"):
            node.set_friendly_name(f"{node.get_type_name()}_{index}")
    ov.save_model(model, path, compress_to_fp16=False)


def _versions() -> dict[str, str]:
    try:
        versions = {name: metadata.version(name) for name in ("openvino", "openvino-genai")}
    except metadata.PackageNotFoundError as error:
        raise HostError(
            f"the Python package {error.name} is not installed",
            why="backend openvino compiles and runs its engine with it",
            next="pip install 'lpxbuild[embedded]' (Python 3.10 to 3.12)",
        ) from None
    return {"lpx": lpxbuild.__version__, **versions}


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            digest.update(block)
    return digest.hexdigest()


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
