"""NVIDIA ModelOpt's exports as the parity tests use them: digests, calibration state, and what each name means.

`python tests/parity/oracle_goldens.py` writes docs/formats-parity.md.
"""

from __future__ import annotations

import gzip
import hashlib
import json
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from lpxbuild.errors import LpxError
from lpxbuild.output import Output
from lpxbuild.quantization import check_shapes, format_for
from lpxbuild.quantization.calibrated import Calibration
from lpxbuild.quantization.scheme import Scheme
from lpxbuild.source import Source, check

ORACLE = Path(__file__).parent / "oracle"
TABLE = Path(__file__).parents[2] / "docs" / "formats-parity.md"
SCHEMES = {
    "bf16": Scheme(),
    "fp16": Scheme(),
    "fp8kv": Scheme("fp8", "fp8"),
    "fp8pcpt": Scheme("fp8_pc_pt"),
    "int8sqkv8": Scheme("int8_sq", "int8"),
    "int4awq": Scheme("int4_awq", group_size=128),
    "int4awq64": Scheme("int4_awq", group_size=64),
    "w4a8awq": Scheme("w4a8_awq", group_size=128),
    "nvfp4": Scheme("nvfp4"),
    "nvfp4kvfp8": Scheme("nvfp4", "fp8"),
    "w4a16nvfp4": Scheme("w4a16_nvfp4"),
}


UNKNOWN = {
    "gpt2-int4awq": ("transformer.layers.1.mlp.proj",),
    "gpt2-int4awq64": ("transformer.layers.1.mlp.fc",),
    "gpt2-w4a8awq": ("transformer.layers.1.mlp.proj",),
    "llama-h256-int4awq64": ("transformer.layers.1.mlp.fc",),
    "llama-int4awq": ("transformer.layers.1.mlp.gate",),
    "llama-w4a8awq": ("transformer.layers.1.mlp.gate",),
}
"""Linears whose float32 factors are lost: ModelOpt kept them rounded, and a calibration on another processor does not
find them again to the last bit. Names, types, shapes and factors are compared, weights and their scales are not."""


@cache
def _pack() -> dict[str, Any]:
    return json.loads(gzip.decompress((ORACLE / "golden.json.gz").read_bytes()))


GOLDENS = tuple(sorted(_pack()["goldens"]))
"""NAME-FORMAT-TPn of all of them."""


def parts(golden: str) -> tuple[str, str, int]:
    """(model, name of the export, tensor parallel)."""
    base, _, ranks = golden.rpartition("-TP")
    model, _, kind = base.rpartition("-")
    return model, kind, int(ranks)


def named(*kinds: str) -> tuple[str, ...]:
    """The goldens of these exports."""
    return tuple(golden for golden in GOLDENS if parts(golden)[1] in kinds)


def ranks(golden: str) -> list[dict[str, dict[str, Any]]]:
    """Name → dtype, shape and SHA-256 of each tensor of each rank, as the export has them."""
    known = _pack()["sha256"]
    return [
        {
            name: {"dtype": dtype, "shape": shape, "sha256": known[digest]}
            for name, (dtype, shape, digest) in rank.items()
        }
        for rank in _pack()["goldens"][golden]["ranks"]
    ]


def their_config(golden: str) -> dict[str, Any]:
    """The config.json of the export."""
    found: dict[str, Any] = _pack()["goldens"][golden]["config"]
    return found


def calibration(golden: str) -> Calibration | None:
    """The quantizers' buffers after the calibration that the export was made from."""
    model, kind, _ = parts(golden)
    prefix = f"{model}-{kind}/"
    found = {name.removeprefix(prefix): values for name, values in _state().items() if name.startswith(prefix)}
    return Calibration(found) if found else None


@cache
def _state() -> dict[str, Any]:
    return load_file(ORACLE / "state.safetensors")


@cache
def source(model: str, tensor_parallel: int) -> Source:
    """The checked model that was exported."""
    return check(
        ORACLE / "in" / model,
        origin=model,
        need_tokenizer=False,
        tensor_parallel=tensor_parallel,
        output=Output.quiet(),
    )


def digests(file: Path) -> dict[str, dict[str, Any]]:
    """dtype, shape and SHA-256 of each tensor, read by the format's description (u64 length, JSON, data)."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            digest = hashlib.sha256(data[8 + length + begin : 8 + length + end]).hexdigest()
            found[name] = {"dtype": entry["dtype"], "shape": entry["shape"], "sha256": digest}
    return found


def refusal(golden: str) -> str | None:
    """Why the build for TensorRT-LLM refuses to make this checkpoint; None where it does not."""
    model, kind, tensor_parallel = parts(golden)
    scheme = SCHEMES[kind]
    try:
        format_for(scheme.format, backend="tensorrt")
        check_shapes(source(model, tensor_parallel).shape, scheme, tensor_parallel)
    except LpxError as error:
        return error.what
    return None


def table() -> str:
    """docs/formats-parity.md."""
    partly = [
        f"  - {golden}: `{linear}`" for golden in GOLDENS for linear in UNKNOWN.get(golden.rpartition("-TP")[0], ())
    ]
    lines = [
        "# Parity with NVIDIA ModelOpt's exports",
        "",
        f"{len(GOLDENS)} exports of ModelOpt 0.47.0 (tiny random models) beside what lpx writes from the same weights",
        "and the same calibration (`tests/parity/test_oracle.py`).",
        "",
        f"- {len(GOLDENS) - len(partly)} of them match in every hash.",
        f"- In {len(partly)}, the digests of one linear's weight and scales are not compared. ModelOpt",
        "  divides weights by float32 factors (AWQ) and keeps the factors rounded to bfloat16; the float32 ones",
        "  that it used could not be recovered for:",
        *partly,
        "- For about 40 further linears of AWQ exports, float32 factors were solved for: they round to what ModelOpt",
        "  kept and give the weights that it wrote. The match shows that a consistent factor exists, not that it is",
        "  ModelOpt's.",
        "",
        "Two things are left out of the comparison because lpx differs on purpose, each with a test of its own:",
        "Gemma's head, and vocabularies that ModelOpt pads for AWQ.",
        "",
        "Some models have sizes that TensorRT-LLM's kernels cannot take, so that no release could load the export:",
        "lpx's writer makes it all the same, and its build refuses. `v257` models have 257 tokens, `h256` ones a",
        "hidden size of 256.",
        "",
        "| model | export | quantization.format | KV cache | TP | build for `tensorrt` |",
        "|---|---|---|---|---|---|",
    ]
    for golden in GOLDENS:
        model, kind, tensor_parallel = parts(golden)
        scheme = SCHEMES[kind]
        group = f", groups of {scheme.group_size}" if "int4" in kind or "w4a8" in kind else ""
        refused = refusal(golden)
        lines.append(
            f"| {model} | {kind} | `{scheme.format}`{group} | {scheme.kv_cache} | {tensor_parallel} "
            f"| {'made' if refused is None else f'refused: {refused}'} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    TABLE.write_text(table())
