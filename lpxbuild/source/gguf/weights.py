"""GGUF tensors to one safetensors file, a few megabytes at a time."""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpxbuild.errors import HostError, SourceError
from lpxbuild.output import Output
from lpxbuild.source.gguf.architectures import Architecture, architecture_of
from lpxbuild.source.gguf.metadata import Metadata
from lpxbuild.source.header import DTYPE_BYTES
from lpxbuild.source.weights import FLOAT_DTYPES

if TYPE_CHECKING:
    from numpy.typing import NDArray

_BLOCK_VALUES = 1 << 20  # values dequantized at once: 4 MiB in float32
_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_STACKED = re.compile(r"blk\.(\d+)\.(\w+)_exps\.weight")
_ONE_EXPERT = re.compile(r"blk\.(\d+)\.(\w+)\.(\d+)\.weight")  # files older than April 2024


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor to write.

    Attributes:
        heads: set for q and k where llama.cpp's converter has reordered the rows.
        expert: the slice of a stacked source tensor.
        minus_one: the stored values are one larger.
    """

    name: str
    shape: tuple[int, ...]
    source: Any  # gguf.ReaderTensor
    heads: int | None = None
    expert: int | None = None
    minus_one: bool = False

    @property
    def data(self) -> NDArray[Any]:
        """The stored rows, possibly quantized."""
        data: NDArray[Any] = self.source.data
        return data if self.expert is None else data[self.expert]


@dataclass(frozen=True)
class WeightPlan:
    """What the safetensors file will hold, and what belongs into the config: `beside` are the RoPE factors by name."""

    tensors: tuple[PlannedTensor, ...]
    dtype: str
    types: tuple[str, ...]  # GGUF's names, most frequent first
    vocab_size: int
    tied: bool
    biases: Mapping[str, bool]
    beside: Mapping[str, list[float]]

    @property
    def nbytes(self) -> int:
        import math

        return sum(math.prod(tensor.shape) for tensor in self.tensors) * DTYPE_BYTES[_safetensors_name(self.dtype)]


def plan_weights(metadata: Metadata, tensors: Sequence[Any], dtype: str) -> WeightPlan:
    """Names, shapes and the target dtype of all tensors.

    Raises:
        SourceError: a tensor is unknown, missing, or the biases are not all or none.
    """
    architecture = architecture_of(metadata)
    planned: dict[str, PlannedTensor] = {}
    beside: dict[str, list[float]] = {}
    for tensor in tensors:
        if tensor.name in architecture.beside:
            beside[tensor.name] = [_shortest(value) for value in tensor.data.reshape(-1)]
            continue
        found = list(_placed(metadata, architecture, tensor))
        if not found:
            raise metadata.refused(
                f"has the tensor {tensor.name}, which a {architecture.model_type} model does not have",
                "leaving it out would make another model",
            )
        planned.update({one.name: one for one in found})
    layers = metadata.size(metadata.key("block_count"))
    _check_complete(metadata, architecture, planned, layers)
    return WeightPlan(
        tensors=tuple(planned.values()),
        dtype=_target(metadata, planned, dtype),
        types=tuple(dict.fromkeys(sorted(_types(planned), key=_types(planned).count, reverse=True))),
        vocab_size=planned["model.embed_tokens.weight"].shape[0],
        tied="lm_head.weight" not in planned,
        biases={
            key: _biased(metadata, architecture, planned, group, layers)
            for key, group in architecture.all_or_no_biases.items()
        },
        beside=beside,
    )


def _placed(metadata: Metadata, architecture: Architecture, tensor: Any) -> Iterator[PlannedTensor]:
    """What a GGUF tensor becomes; nothing for one that the architecture does not have."""
    shape = tuple(int(n) for n in reversed(tensor.shape))  # GGUF counts dimensions from the innermost
    minus_one = architecture.norms_plus_one and tensor.name.endswith("norm.weight")
    stem, _, suffix = tensor.name.rpartition(".")
    if stem in _WHOLE and suffix == "weight":
        yield PlannedTensor(f"{_WHOLE[stem]}.weight", shape, tensor, minus_one=minus_one)
        return
    if match := _STACKED.fullmatch(tensor.name):
        module = architecture.experts.get(match[2])
        count = metadata.size(metadata.key("expert_count")) if module else 0
        if module and (len(shape) != 3 or shape[0] != count):
            raise metadata.refused(f"has {tensor.name} of the shape {shape}", f"it should stack {count} experts")
        for expert in range(count):
            name = f"model.layers.{int(match[1])}.{str(module).format(expert=expert)}.weight"
            yield PlannedTensor(name, shape[1:], tensor, expert=expert)
        return
    if (match := _ONE_EXPERT.fullmatch(tensor.name)) and match[2] in architecture.experts:
        module = architecture.experts[match[2]].format(expert=int(match[3]))
        yield PlannedTensor(f"model.layers.{int(match[1])}.{module}.weight", shape, tensor)
        return
    match = _IN_LAYER.fullmatch(tensor.name)
    if match and match[2] in architecture.layer and (match[3] == "weight" or _may_be_biased(architecture, match[2])):
        name = f"model.layers.{int(match[1])}.{architecture.layer[match[2]]}.{match[3]}"
        heads = _reordered_heads(metadata, architecture, match[2], tensor.name, shape)
        yield PlannedTensor(name, shape, tensor, heads, minus_one=minus_one)


def _may_be_biased(architecture: Architecture, stem: str) -> bool:
    return stem in architecture.biases or any(stem in group for group in architecture.all_or_no_biases.values())


def _reordered_heads(
    metadata: Metadata, architecture: Architecture, stem: str, name: str, shape: tuple[int, ...]
) -> int | None:
    if not architecture.interleaved or stem not in ("attn_q", "attn_k"):
        return None
    heads = metadata.size(metadata.key("attention.head_count"))
    if stem == "attn_k":
        heads = metadata.size(metadata.key("attention.head_count_kv"), heads)
    if shape[0] % (2 * heads):
        raise SourceError(
            f"{metadata.file.name}: {name} has {shape[0]} rows, no {heads} heads of an even size",
            why="the number of heads in the file belongs to another model",
            next="download the file again, or give the Hugging Face folder of this model",
        )
    return heads


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

    data, kind = tensor.data, tensor.source.tensor_type
    if len(tensor.shape) == 1 and tensor.heads is None:
        values = dequantize(data, kind)
        yield values - np.float32(1) if tensor.minus_one else values
        return
    rows = tensor.shape[0]
    order = np.arange(rows)
    if tensor.heads is not None:
        # llama.cpp interleaves the two halves that RoPE turns together; Hugging Face keeps them one after the other.
        order = order.reshape(tensor.heads, rows // tensor.heads // 2, 2).swapaxes(1, 2).reshape(rows)
    step = max(1, _BLOCK_VALUES // (tensor.shape[1] if len(tensor.shape) > 1 else 1))
    for begin in range(0, rows, step):
        yield dequantize(data[order[begin : begin + step]], kind)


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


def _check_complete(
    metadata: Metadata, architecture: Architecture, planned: Mapping[str, PlannedTensor], layers: int
) -> None:
    needed = ["model.embed_tokens.weight", "model.norm.weight"]
    in_layer = [f"{module}.weight" for module in architecture.layer.values()]
    in_layer += [f"{architecture.layer[stem]}.bias" for stem in architecture.biases]
    if architecture.experts:
        experts = range(metadata.size(metadata.key("expert_count")))
        in_layer += [f"{m.format(expert=e)}.weight" for m in architecture.experts.values() for e in experts]
    needed += [f"model.layers.{layer}.{name}" for layer in range(layers) for name in in_layer]
    missing = [name for name in needed if name not in planned]
    if missing:
        raise SourceError(
            f"{metadata.file.name} lacks {len(missing)} tensors of its {layers} layers, the first is {missing[0]}",
            why="the file is incomplete",
            next="download the file again",
        )


def _biased(
    metadata: Metadata,
    architecture: Architecture,
    planned: Mapping[str, PlannedTensor],
    group: tuple[str, ...],
    layers: int,
) -> bool:
    parts = [architecture.layer[stem].rpartition(".")[2] for stem in group]
    found = sum(name.endswith(tuple(f".{part}.bias" for part in parts)) for name in planned)
    if found not in (0, layers * len(parts)):
        raise metadata.refused(
            f"has {found} biases on {', '.join(parts)}, a {architecture.model_type} model has all "
            f"{layers * len(parts)} or none",
            "config.json can only say that all of them are there",
        )
    return found > 0


def _shortest(value: Any) -> float:
    """A float32 as the shortest decimal that reads back the same."""
    import numpy as np

    return float(str(np.float32(value)))


def _types(planned: Mapping[str, PlannedTensor]) -> list[str]:
    return [tensor.source.tensor_type.name for tensor in planned.values()]


def _target(metadata: Metadata, planned: Mapping[str, PlannedTensor], dtype: str) -> str:
    """The dtype to write: as asked, else the file's own, else bfloat16 (norms and routers are always float32)."""
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
    matrices = [t.source for t in planned.values() if len(t.shape) > 1 and ".ffn_gate_inp." not in t.source.name]
    kinds = {source.tensor_type.name for source in matrices}
    if dtype != "auto":
        return dtype
    return FLOAT_DTYPES[kinds.pop()] if len(kinds) == 1 and kinds <= FLOAT_DTYPES.keys() else "bfloat16"


def _safetensors_name(dtype: str) -> str:
    return next(name for name, value in FLOAT_DTYPES.items() if value == dtype)
