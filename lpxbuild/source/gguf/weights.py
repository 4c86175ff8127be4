"""GGUF tensors to one safetensors file, a few megabytes at a time."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpxbuild.errors import HostError, SourceError
from lpxbuild.output import Output
from lpxbuild.source.gguf.metadata import ARCHITECTURE, Metadata
from lpxbuild.source.header import DTYPE_BYTES
from lpxbuild.source.weights import FLOAT_DTYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BLOCK_VALUES = 1 << 20  # values dequantized at once: 4 MiB in float32
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS = "rope_freqs.weight"
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor to write: `heads` is set for q and k, whose rows llama.cpp's converter has reordered."""

    name: str
    shape: tuple[int, ...]
    source: Any  # gguf.ReaderTensor
    heads: int | None


@dataclass(frozen=True)
class WeightPlan:
    """What the safetensors file will hold."""

    tensors: tuple[PlannedTensor, ...]
    dtype: str
    types: tuple[str, ...]  # GGUF's names, most frequent first
    vocab_size: int
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    rope_factors: list[float] | None

    @property
    def nbytes(self) -> int:
        import math

        return sum(math.prod(tensor.shape) for tensor in self.tensors) * DTYPE_BYTES[_safetensors_name(self.dtype)]


def plan_weights(metadata: Metadata, tensors: Sequence[Any], dtype: str) -> WeightPlan:
    """Names, shapes and the target dtype of all tensors.

    Raises:
        SourceError: a tensor is unknown, missing, or the biases are not all or none.
    """
    heads = metadata.size(f"{ARCHITECTURE}.attention.head_count")
    kv_heads = metadata.size(f"{ARCHITECTURE}.attention.head_count_kv", heads)
    planned: dict[str, PlannedTensor] = {}
    factors: list[float] | None = None
    for tensor in tensors:
        if tensor.name == _ROPE_FACTORS:
            factors = [float(value) for value in tensor.data.reshape(-1)]
            continue
        name = _hugging_face_name(tensor.name)
        if name is None:
            raise SourceError(
                f"{metadata.file.name} has the tensor {tensor.name}, which a llama model does not have",
                why="leaving it out would make another model",
                next="give the Hugging Face folder or hub id of this model",
            )
        shape = tuple(int(n) for n in reversed(tensor.shape))  # GGUF counts dimensions from the innermost
        permuted = heads if ".q_proj." in name else kv_heads if ".k_proj." in name else None
        if permuted is not None and shape[0] % (2 * permuted):
            raise SourceError(
                f"{metadata.file.name}: {tensor.name} has {shape[0]} rows, no {permuted} heads of an even size",
                why="the number of heads in the file belongs to another model",
                next="download the file again, or give the Hugging Face folder of this model",
            )
        planned[name] = PlannedTensor(name, shape, tensor, permuted)
    layers = metadata.size(f"{ARCHITECTURE}.block_count")
    _check_complete(metadata, planned, layers)
    return WeightPlan(
        tensors=tuple(planned.values()),
        dtype=_target(metadata, planned, dtype),
        types=tuple(dict.fromkeys(sorted(_types(planned), key=_types(planned).count, reverse=True))),
        vocab_size=planned["model.embed_tokens.weight"].shape[0],
        tied="lm_head.weight" not in planned,
        attention_bias=_biased(metadata, planned, _ATTENTION, layers),
        mlp_bias=_biased(metadata, planned, _MLP, layers),
        rope_factors=factors,
    )


def write_weights(path: Path, plan: WeightPlan, *, output: Output) -> None:
    """Write the safetensors file, block by block; memory does not grow with the model or its largest tensor."""
    kind = _safetensors_name(plan.dtype)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    position = 0
    for tensor in plan.tensors:
        size = DTYPE_BYTES[kind]
        for length in tensor.shape:
            size *= length
        header[tensor.name] = {"dtype": kind, "shape": list(tensor.shape), "data_offsets": [position, position + size]}
        position += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    infinite = 0
    try:
        with path.open("wb") as file, output.progress("dequantize", position) as advance:
            file.write(len(text).to_bytes(8, "little") + text)
            for tensor in plan.tensors:
                for block in _blocks(tensor):
                    cast, overflown = _cast(block, plan.dtype)
                    infinite += overflown
                    file.write(cast.tobytes())
                    advance(cast.nbytes)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise HostError(
                f"{path} cannot be written: {error.strerror}",
                why=f"the file needs {position + len(text) + 8} bytes",
                next="free some space, or set LPX_CACHE to a folder on a larger disk",
            ) from None
        raise
    if infinite:
        output.notice(f"{infinite} values are too large for {plan.dtype} and became infinite: use bfloat16 or float32")


def _blocks(tensor: PlannedTensor) -> Iterator[NDArray[Any]]:
    """float32 values of a tensor in Hugging Face's row order, about 4 MiB at a time."""
    import numpy as np
    from gguf import dequantize

    source = tensor.source
    if len(tensor.shape) == 1 and tensor.heads is None:
        yield dequantize(source.data, source.tensor_type)
        return
    rows = tensor.shape[0]
    order = np.arange(rows)
    if tensor.heads is not None:
        # llama.cpp interleaves the two halves that RoPE turns together; Hugging Face keeps them one after the other.
        order = order.reshape(tensor.heads, rows // tensor.heads // 2, 2).swapaxes(1, 2).reshape(rows)
    step = max(1, _BLOCK_VALUES // (tensor.shape[1] if len(tensor.shape) > 1 else 1))
    for begin in range(0, rows, step):
        yield dequantize(source.data[order[begin : begin + step]], source.tensor_type)


def _cast(block: NDArray[Any], dtype: str) -> tuple[NDArray[Any], int]:
    import ml_dtypes
    import numpy as np

    if dtype == "float32":
        return np.ascontiguousarray(block, dtype=np.float32), 0
    if dtype == "bfloat16":
        return np.ascontiguousarray(block.astype(ml_dtypes.bfloat16).view(np.uint16)), 0
    with np.errstate(over="ignore"):
        cast = np.ascontiguousarray(block.astype(np.float16))
    return cast, int(np.isinf(cast).sum() - np.isinf(block).sum())


def _hugging_face_name(name: str) -> str | None:
    stem, _, suffix = name.rpartition(".")
    if stem in _WHOLE and suffix == "weight":
        return f"{_WHOLE[stem]}.weight"
    match = _IN_LAYER.fullmatch(name)
    if match and match[2] in _LAYER:
        return f"model.layers.{int(match[1])}.{_LAYER[match[2]]}.{match[3]}"
    return None


def _check_complete(metadata: Metadata, planned: dict[str, PlannedTensor], layers: int) -> None:
    needed = ["model.embed_tokens.weight", "model.norm.weight"]
    needed += [f"model.layers.{layer}.{part}.weight" for layer in range(layers) for part in _LAYER.values()]
    missing = [name for name in needed if name not in planned]
    if missing:
        raise SourceError(
            f"{metadata.file.name} lacks {len(missing)} tensors of its {layers} layers, the first is {missing[0]}",
            why="the file is incomplete",
            next="download the file again",
        )


def _biased(metadata: Metadata, planned: dict[str, PlannedTensor], parts: tuple[str, ...], layers: int) -> bool:
    found = sum(name.endswith(tuple(f".{part}.bias" for part in parts)) for name in planned)
    if found not in (0, layers * len(parts)):
        raise SourceError(
            f"{metadata.file.name} has {found} biases on {', '.join(parts)}, a Llama model has all "
            f"{layers * len(parts)} or none",
            why="config.json can only say that all of them are there",
            next="give the Hugging Face folder or hub id of this model",
        )
    return found > 0


def _types(planned: dict[str, PlannedTensor]) -> list[str]:
    return [tensor.source.tensor_type.name for tensor in planned.values()]


def _target(metadata: Metadata, planned: dict[str, PlannedTensor], dtype: str) -> str:
    """The dtype to write: as asked, else the file's own, else bfloat16 (norms are float32 in every GGUF)."""
    from gguf import dequantize

    first_of_kind = {tensor.source.tensor_type.name: tensor.source for tensor in planned.values()}
    for kind, source in first_of_kind.items():
        try:
            dequantize(source.data[:1] if len(source.shape) > 1 else source.data, source.tensor_type)
        except NotImplementedError:
            raise SourceError(
                f"{metadata.file.name} has tensors of the type {kind}, which the gguf library cannot dequantize",
                why="the library knows the usual Q, K, IQ and float types",
                next="pip install --upgrade gguf, or take the model in another quantization",
            ) from None
    kinds = {t.source.tensor_type.name for t in planned.values() if len(t.shape) > 1}
    if dtype != "auto":
        return dtype
    return FLOAT_DTYPES[kinds.pop()] if len(kinds) == 1 and kinds <= FLOAT_DTYPES.keys() else "bfloat16"


def _safetensors_name(dtype: str) -> str:
    return next(name for name, value in FLOAT_DTYPES.items() if value == dtype)
