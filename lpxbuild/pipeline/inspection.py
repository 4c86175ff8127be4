"""What `lpx inspect` calls: one function per kind of thing, told apart by the files it has."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpxbuild.errors import UsageError
from lpxbuild.output import Output
from lpxbuild.pipeline import manifest as manifests
from lpxbuild.pipeline.host import mb

if TYPE_CHECKING:
    from lpxbuild.source import Source


@dataclass(frozen=True)
class Inspected:
    """`data` for machines, `text` for people."""

    data: dict[str, Any]
    text: str


@dataclass(frozen=True)
class Kind:
    """One kind of thing: how it is recognised, what it says."""

    name: str
    recognise: Callable[[Path], bool]
    describe: Callable[[Path, Output], dict[str, Any]]


def inspect_path(path: Path, *, output: Output) -> Inspected:
    """Say what a file or folder is.

    Raises:
        UsageError: nothing that lpx knows.
        SourceError, RecipeError: it is one, and it is broken; the message says where.
    """
    if not path.exists():
        raise UsageError(f"{path} does not exist", next="give a recipe, a model folder or a build folder")
    for kind in KINDS:
        if kind.recognise(path):
            data = {"path": str(path), "kind": kind.name, **kind.describe(path, output)}
            return Inspected(data, "\n".join(_lines(data)))
    raise UsageError(
        f"{path} is nothing that lpx knows",
        why=f"it knows: {', '.join(kind.name for kind in KINDS)}",
        next="give the folder that holds config.json, manifest.json or engine.json",
    )


def _recipe(path: Path, _output: Output) -> dict[str, Any]:
    from lpxbuild.recipe import Recipe

    return {"recipe": Recipe.load(path).model_dump(mode="json")}


def _build(path: Path, _output: Output) -> dict[str, Any]:
    manifest = manifests.read(path)
    stages = {
        name: {
            "digest": stage["digest"],
            "bytes": sum(file["size"] for file in stage["files"].values()),
            "seconds": stage["seconds"],
        }
        for name, stage in manifest.stages.items()
    }
    engine = manifest.stages.get("engine", {}).get("report", {})
    return {
        "state": manifest.state,
        "backend": manifest.data["backend"],
        "executor": engine.get("executor"),
        "attention_features": engine.get("attention_features"),
        "precision": engine.get("precision"),
        "source": {name: value for name, value in manifest.data["inputs"].items() if name != "files"},
        "stages": stages,
        "versions": manifest.data["versions"],
        "evidence": manifest.data["evidence"].get("ran", []),
        "notices": manifest.data["notices"],
        "changed": manifests.differences(path, manifest),
    }


def _engine(path: Path, _output: Output) -> dict[str, Any]:
    file = path / "engine.json"
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise UsageError(
            f"{file} is not valid JSON", why=str(error), next="lpx build RECIPE   makes it anew"
        ) from error
    if not isinstance(data, dict):
        raise UsageError(f"{file} is not what lpx wrote", why="it holds no JSON object", next="lpx build RECIPE")
    return {"engine": data}


def _checkpoint(path: Path, _output: Output) -> dict[str, Any]:
    from lpxbuild import checkpoint

    reader = checkpoint.read(path)
    tensor, pipeline = reader.world
    ranks = range(tensor * pipeline)
    return {
        "architecture": reader.config["architecture"],
        "dtype": reader.config["dtype"],
        "quantization": reader.config["quantization"],
        "parallel": {"tensor": tensor, "pipeline": pipeline},
        "ranks": [
            {
                "file": f"rank{rank}.safetensors",
                "tensors": len(reader.names(rank)),
                "bytes": (path / f"rank{rank}.safetensors").stat().st_size,
            }
            for rank in ranks
        ],
        "model": _model(reader.shape),
        "tokenizer": (path / "tokenizer").is_dir(),
    }


def _repository(path: Path, _output: Output) -> dict[str, Any]:
    from google.protobuf.text_format import ParseError

    from lpxbuild.repository import validate
    from lpxbuild.repository.config import parse_config

    models = {}
    for file in sorted(path.glob("*/config.pbtxt")):
        try:
            config = parse_config(file)
        except (ParseError, UnicodeDecodeError) as error:
            raise UsageError(
                f"{file} is not a model configuration of Triton",
                why=str(error),
                next="lpx build RECIPE   makes it anew",
            ) from error
        models[file.parent.name] = {
            "backend": config.backend or config.platform,
            "max_batch_size": config.max_batch_size,
            "decoupled": config.model_transaction_policy.decoupled,
            "instances": sum(group.count for group in config.instance_group),
            "inputs": len(config.input),
            "outputs": len(config.output),
        }
    return {"models": models, "findings": [str(finding) for finding in validate(path)]}


def _model_folder(path: Path, output: Output) -> dict[str, Any]:
    from lpxbuild import source
    from lpxbuild.families import tensor_parallel_sizes

    checked = source.check(path, origin=str(path), need_tokenizer=False, output=output)
    return {
        "architecture": checked.shape.architecture,
        "revision": checked.revision,
        "parameters": checked.parameters,
        "bytes": sum(entry.nbytes for entry in checked.tensors.values()),
        "tensors": len(checked.tensors),
        "quantization": _quantization(checked),
        "model": _model(checked.shape),
        "end_ids": list(checked.end_ids),
        "pad_id": checked.pad_id,
        "tensor_parallel_sizes": list(tensor_parallel_sizes(checked.shape)),
        "notices": list(checked.notices),
    }


def _quantization(checked: Source) -> dict[str, Any] | None:
    found = checked.quantization
    if found is None:
        return None
    return {
        "method": found.method,
        "format": found.format,
        "group_size": found.group_size,
        "kv_cache": found.kv_cache,
        "layouts": list(found.layouts),
        "loads the files as they are": list(found.loaders),
        "unquantized": list(found.unquantized),
    }


def _gguf(path: Path, _output: Output) -> dict[str, Any]:
    from lpxbuild.source.glance import glance

    seen = glance(str(path), None, hub=False)
    return {"bytes": path.stat().st_size, "config": seen.config, "chat_template": seen.chat}


def _model(shape: Any) -> dict[str, Any]:
    from lpxbuild.engine import BACKENDS
    from lpxbuild.families import attention_features

    features = attention_features(shape)
    executors = {
        name: sorted({backend.attention.get(feature, "refused") for feature in features}) or ["paged"]
        for name, backend in BACKENDS.items()
    }
    known = {name: value for name, value in asdict(shape).items() if value is not None}
    return {**known, "attention_features": list(features), "executor": executors}


KINDS = (
    Kind("recipe", lambda path: path.is_file() and path.suffix in (".yaml", ".yml"), _recipe),
    Kind("GGUF file", lambda path: path.is_file() and path.suffix == ".gguf", _gguf),
    Kind("build folder", lambda path: (path / manifests.FILE).is_file(), _build),
    Kind("engine", lambda path: (path / "engine.json").is_file(), _engine),
    Kind("model repository", lambda path: (path / "ensemble" / "config.pbtxt").is_file(), _repository),
    Kind("TensorRT-LLM checkpoint", lambda path: _has_key(path / "config.json", "architecture"), _checkpoint),
    Kind("Hugging Face model folder", lambda path: path.is_dir() and any(path.glob("*config.json")), _model_folder),
)
"""In the order they are tried; a checkpoint's config.json says `architecture`, Hugging Face's `architectures`."""


def _has_key(path: Path, key: str) -> bool:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(data, dict) and key in data and "mapping" in data


def _lines(data: dict[str, Any], indent: str = "") -> list[str]:
    """Nested data as indented `key: value` lines; sizes in bytes also in a readable unit."""
    lines: list[str] = []
    for key, value in data.items():
        label = f"{indent}{key}:"
        if isinstance(value, dict) and value:
            lines += [label, *_lines(value, indent + "  ")]
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            lines.append(label)
            for item in value:
                first, *rest = _lines(item, indent + "    ")
                lines += [f"{indent}  - {first.strip()}", *rest]
        elif key == "bytes" and isinstance(value, int):
            lines.append(f"{label} {value:,} ({mb(value)})")
        elif isinstance(value, list):
            lines.append(f"{label} {', '.join(map(str, value)) or 'none'}")
        else:
            lines.append(f"{label} {_shown(value)}")
    return lines


def _shown(value: Any) -> str:
    if value is None or value == {}:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) and value >= 100_000 else str(value)
