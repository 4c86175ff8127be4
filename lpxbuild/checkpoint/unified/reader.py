"""Reads a unified checkpoint back as numbers: effective float32 weights by Hugging Face's names.

It knows the layout from the files alone, hf_quant_config.json and the tensors. Transformers has no loader for this
layout; with these weights put into one of its models, it computes what a backend computes apart from the rounding of
inputs.
"""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from lpxbuild.checkpoint.cast import Array
from lpxbuild.checkpoint.unified.encoding import ENCODINGS
from lpxbuild.checkpoint.unified.shards import INDEX, WHOLE
from lpxbuild.errors import SourceError
from lpxbuild.quantization import FORMATS, awq, fp8, int4, int8, nvfp4
from lpxbuild.source.header import read_header

TYPES: Mapping[str, Any] = {
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "I8": np.int8,
    "U8": np.uint8,
}
SCALES = (".weight_scale", ".weight_scale_2", ".input_scale", ".pre_quant_scale", ".k_scale", ".v_scale")
_REBUILD = "build it again: lpx build RECIPE --to checkpoint --force"
_FORMATS = {FORMATS[name].quant_algo: name for name in ENCODINGS}
CONV1D = ("gpt2",)
"""Families whose linears the files hold as (in, out)."""


class UnifiedReader:
    """A complete checkpoint, mapped read-only.

    Attributes:
        path: the folder.
        config: config.json as read.
        quantization: what hf_quant_config.json says under `quantization`; empty for a plain checkpoint.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = _json(path / "config.json")
        method = (self.config.get("quantization_config") or {}).get("quant_method", "modelopt")
        if method != "modelopt":
            raise SourceError(
                f"{path} holds the files of another tool, quant_method {method}",
                why="a source that is quantized already goes through as it is",
                next="read its weights from the source",
            )
        file = path / "hf_quant_config.json"
        self.quantization: Mapping[str, Any] = _json(file)["quantization"] if file.is_file() else {}
        self._entries = {}
        for name in sorted(set(self._weight_map().values())) if (path / INDEX).is_file() else [WHOLE]:
            if not (path / name).is_file():
                raise SourceError(f"{name} of the checkpoint is missing ({path})", next=_REBUILD)
            self._entries.update(read_header(path / name, download=_REBUILD))
        self._maps: dict[Path, mmap.mmap] = {}

    def _weight_map(self) -> Mapping[str, str]:
        found: Mapping[str, str] = _json(self.path / INDEX)["weight_map"]
        return found

    @property
    def weights(self) -> Iterator[str]:
        """Names of the model's own tensors: everything but scales."""
        return (name for name in self._entries if not name.endswith(SCALES))

    def stored(self, name: str) -> Array:
        """A tensor as it lies in the file: a read-only view."""
        entry = self._entries[name]
        data = self._maps.get(entry.file)
        if data is None:
            with entry.file.open("rb") as file:
                data = self._maps[entry.file] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        flat = np.frombuffer(data, np.uint8, entry.nbytes, entry.begin)
        values: Array = flat.view(TYPES[entry.dtype]).reshape(entry.shape)
        return values

    def format_of(self, module: str) -> str:
        """lpx's name of a module's format ("none" = plain)."""
        if f"{module}.weight_scale" not in self._entries:
            return "none"
        algorithm = self.quantization.get("quant_algo")
        if algorithm == "MIXED_PRECISION":
            algorithm = self.quantization["quantized_layers"][module]["quant_algo"]
        return _FORMATS[algorithm]

    def key_value_scales(self, attention: str) -> tuple[float, float] | None:
        """Scales of an FP8 KV cache; None where the attention module has none."""
        names = (f"{attention}.k_proj.k_scale", f"{attention}.v_proj.v_scale")
        if names[0] not in self._entries:
            return None
        key, value = (float(self.stored(name)) for name in names)
        return key, value

    def weight(self, name: str) -> npt.NDArray[np.float32]:
        """A tensor of the model in float32 and in the model's own shape: dequantized, with the factors of its input.

        Args:
            name: a Hugging Face name ("model.layers.0.mlp.down_proj.weight").
        """
        return self.rows(name, 0, self.shape(name)[0])

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape in the model, before anything was packed."""
        _, format_name = self._quantized(name)
        shape = self._entries[name].shape
        if format_name == "none":
            return shape
        packed = {"int4_awq": (2, 1), "w4a8_awq": (2, 1), "nvfp4": (1, 2), "w4a16_nvfp4": (1, 2)}
        out, columns = packed.get(format_name, (1, 1))
        if self._transposed:
            return shape[0] * columns, shape[1] * out
        return shape[0] * out, shape[1] * columns

    def rows(self, name: str, begin: int, end: int) -> npt.NDArray[np.float32]:
        """Rows of `weight`; of a packed format `begin` and `end` are even."""
        module, format_name = self._quantized(name)
        if format_name == "none":
            return self.stored(name)[begin:end].astype(np.float32)
        if self._transposed:
            return np.ascontiguousarray(self._linear(module, format_name, 0, None).T[begin:end])
        return self._linear(module, format_name, begin, end)

    def _quantized(self, name: str) -> tuple[str, str]:
        module, _, suffix = name.rpartition(".")
        return module, self.format_of(module) if suffix == "weight" else "none"

    @property
    def _transposed(self) -> bool:
        return self.config.get("model_type") in CONV1D

    def _linear(self, module: str, format_name: str, begin: int, end: int | None) -> npt.NDArray[np.float32]:
        bits = self.stored(f"{module}.weight")
        if self._transposed:
            bits = np.ascontiguousarray(bits.T)
        scales = self.stored(f"{module}.weight_scale")
        if format_name == "fp8":
            return fp8.decode(bits[begin:end], scales)
        if format_name == "fp8_pc_pt":
            return fp8.decode(bits[begin:end], scales[begin:end, None])
        if format_name == "int8_sq":
            values = int8.decode(bits[begin:end], scales[begin:end])
        elif format_name in ("int4_awq", "w4a8_awq"):
            rows = int4.unpack_rows(bits[begin // 2 : None if end is None else (end + 1) // 2])
            values = int4.decode(rows, scales[begin:end], bits.shape[1] // scales.shape[1])
        else:
            return nvfp4.decode(bits[begin:end], scales[begin:end], self.stored(f"{module}.weight_scale_2"))
        factors = f"{module}.pre_quant_scale"
        return awq.unsmooth(values, self.stored(factors)) if factors in self._entries else values


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise SourceError(f"{path} of the checkpoint cannot be read: {error}", next=_REBUILD) from error
    if not isinstance(value, dict):
        raise SourceError(f"{path} of the checkpoint is not a JSON object", next=_REBUILD)
    return value


def read_unified(path: Path) -> UnifiedReader:
    """Open a unified checkpoint.

    Raises:
        SourceError: a file is missing or damaged; names it.
    """
    return UnifiedReader(path)
