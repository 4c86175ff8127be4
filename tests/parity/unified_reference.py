"""What ModelOpt's export_hf_checkpoint wrote for tiny models, and the same models as sources for lpx.

tests/reference/unified_exports.py made the records; weights follow from the names of the tensors.
"""

from __future__ import annotations

import hashlib
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  makes numpy know bfloat16
import numpy as np
from safetensors import safe_open

from lpxbuild.output import Output
from lpxbuild.quantization.calibrated import Calibration
from lpxbuild.quantization.scheme import Scheme
from lpxbuild.source import Source, check

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "reference"))
from named_weights import bfloat16_bits

RECORDS = Path(__file__).parent / "unified"
MODELS = tuple(sorted(file.stem for file in RECORDS.glob("*.json")))
LEFT_OUT = ("model.layers.0.mlp.down_proj",)
SCHEMES = {
    "none": Scheme(),
    "fp16": Scheme(),
    "fp8": Scheme("fp8"),
    "fp8-kv": Scheme("fp8", "fp8"),
    "kv": Scheme("none", "fp8"),
    "fp8_pc_pt": Scheme("fp8_pc_pt"),
    "int8_sq": Scheme("int8_sq"),
    "int4_awq": Scheme("int4_awq"),
    "int4_awq-g64": Scheme("int4_awq", group_size=64),
    "w4a8_awq": Scheme("w4a8_awq"),
    "nvfp4": Scheme("nvfp4"),
    "nvfp4-kv": Scheme("nvfp4", "fp8"),
    "w4a16_nvfp4": Scheme("w4a16_nvfp4"),
    "fp8-excluded": Scheme("fp8", exclude=LEFT_OUT),
    "nvfp4-excluded": Scheme("nvfp4", exclude=LEFT_OUT),
    "mixed": Scheme("fp8", "fp8", overrides={"*mlp*": "fp8_pc_pt"}),
}
Digests = dict[str, str]


@cache
def record(model: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RECORDS / f"{model}.json").read_text())
    return found


def exports(model: str) -> list[str]:
    """The exports that ModelOpt could make."""
    return [name for name, found in record(model)["exports"].items() if "error" not in found]


def expected(model: str, export: str) -> Digests:
    """Tensor → "DTYPE shape sha256" as exported; of formats, the record leaves out what the plain export has alike."""
    found = record(model)["exports"]
    plain: Digests = found["none"]["tensors"]
    if export in ("none", "fp16"):
        return dict(found[export]["tensors"])
    return {**plain, **found[export]["tensors"]}


def calibration(model: str, export: str) -> Calibration:
    with safe_open(RECORDS / f"{model}.safetensors", "numpy") as file:
        prefix = f"{export}/"
        names = [name for name in file.keys() if name.startswith(prefix)]  # noqa: SIM118  not a dict
        return Calibration({name[len(prefix) :]: file.get_tensor(name) for name in names})


def write_source(model: str, folder: Path, **config: Any) -> Path:
    """The Hugging Face folder of a model, in bfloat16."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**record(model)["config"], "dtype": "bfloat16", **config}))
    header: dict[str, Any] = {}
    data: list[bytes] = []
    position = 0
    for name, text in expected(model, "none").items():
        shape = [int(size) for size in text.split()[1].split("x")]
        data.append(bfloat16_bits(name, tuple(shape)).tobytes())
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, position + len(data[-1])]}
        position += len(data[-1])
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data))
    return folder


def checked(folder: Path) -> Source:
    return check(folder, origin=folder.name, need_tokenizer=False, output=Output.quiet())


def stored(folder: Path) -> dict[str, tuple[str, list[int], bytes]]:
    """Every tensor of a folder's safetensors files, read by the format's description (u64 length, JSON, data)."""
    found: dict[str, tuple[str, list[int], bytes]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                assert name not in found
                found[name] = (entry["dtype"], entry["shape"], data[begin:end])
    return found


def digest(dtype: str, shape: list[int], data: bytes) -> str:
    size = "x".join(map(str, shape)) or "scalar"
    return f"{dtype} {size} {hashlib.sha256(data).hexdigest()[:16]}"


def turned(dtype: str, shape: list[int], data: bytes) -> tuple[str, list[int], bytes]:
    """A stored matrix with rows and columns exchanged."""
    item = len(data) // int(np.prod(shape))
    matrix = np.frombuffer(data, f"V{item}").reshape(shape)
    return dtype, shape[::-1], np.ascontiguousarray(matrix.T).tobytes()
