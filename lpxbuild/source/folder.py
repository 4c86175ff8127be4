"""What lies in a Hugging Face folder: its kind, its JSON files, its weight files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from lpxbuild.errors import SourceError
from lpxbuild.source.header import LFS_PREFIX, read_header
from lpxbuild.source.records import TensorEntry

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER = "tokenizer.json"
TOKENIZER_FILES = (
    TOKENIZER,
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
)
SLOW_TOKENIZER_FILES = ("tokenizer.model", "vocab.json", "merges.txt", "spiece.model")
ADAPTER_CONFIG = "adapter_config.json"
QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
OTHER_WEIGHTS = ("*.bin", "*.pth", "*.pt", "*.gguf", "*.onnx", "*.msgpack", "*.h5")
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def is_repository(text: str) -> bool:
    """Whether the text has the form of a hub id, `organisation/name`."""
    return _REPOSITORY.fullmatch(text) is not None and "--" not in text and ".." not in text


def download_command(path: Path, origin: str, name: str, revision: str | None = None) -> str:
    """The command that fetches one file of the source again."""
    repository = origin if is_repository(origin) and not Path(origin).exists() else "<hub id of the model>"
    pinned = f" --revision {revision}" if revision else ""
    if path.parent.name == "snapshots":  # the hub's cache names a file by its hash: a broken one has to be replaced
        return f"hf download {repository} {name}{pinned} --force-download"
    return f"hf download {repository} {name}{pinned} --local-dir {path}"


def tokenizer_files(path: Path) -> list[Path]:
    """The files a tokenizer of this folder consists of, as present; empty without tokenizer.json."""
    if not (path / TOKENIZER).is_file():
        return []
    return [path / name for name in TOKENIZER_FILES if (path / name).is_file()]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        SourceError: not readable, not JSON (with line and column), not an object.
    """
    try:
        text = path.read_bytes()
    except OSError as error:
        raise SourceError(f"{path} cannot be read: {error.strerror}", next=f"ls -l {path}") from None
    if text.startswith(LFS_PREFIX):
        raise SourceError(
            f"{path.name} is a Git LFS pointer, not the file itself",
            why=f"{path.parent} was cloned without Git LFS",
            next=f"run `git lfs pull` in {path.parent}",
        )
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} is not valid JSON", why=str(error), next="fetch the file again") from None
    if not isinstance(value, dict):
        raise SourceError(f"{path} holds a JSON {type(value).__name__}, not an object", next="fetch the file again")
    return value


def read_config(path: Path) -> dict[str, Any]:
    """config.json of a folder that is a whole model.

    Raises:
        SourceError: not a folder, a LoRA adapter, another format.
    """
    if not path.exists():
        raise SourceError(
            f"no such file or folder: {path}",
            why="a source is a hub id (organisation/name), a Hugging Face folder or a .gguf file",
            next="correct model.source in the recipe",
        )
    if not path.is_dir():
        raise SourceError(f"{path} is a file, expected a Hugging Face folder", next="give the folder that holds it")
    if (path / ADAPTER_CONFIG).is_file() and not (path / WEIGHTS).exists() and not (path / INDEX).exists():
        raise _adapter(path)
    if not (path / CONFIG).is_file():
        raise _no_config(path)
    return read_json(path / CONFIG)


def read_tensors(path: Path, origin: str, revision: str | None) -> tuple[dict[str, TensorEntry], list[Path]]:
    """Headers of all weight files, checked against the index, and the weight files.

    Raises:
        SourceError: a file is missing, cut or broken; the index names a tensor that its file lacks.
    """
    if not (path / INDEX).is_file():
        if not (path / WEIGHTS).is_file():
            raise _no_weights(path, origin, revision)
        file = path / WEIGHTS
        return read_header(file, download=download_command(path, origin, WEIGHTS, revision)), [file]

    weight_map = read_json(path / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()) or not weight_map:
        raise SourceError(
            f"{path / INDEX} has no weight_map (tensor name to file name)",
            next=download_command(path, origin, INDEX, revision),
        )
    names = sorted(set(weight_map.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise SourceError(
                f"{INDEX} names {name!r}, which is not a safetensors file of this folder",
                why=f"the index of {path} is broken",
                next=download_command(path, origin, INDEX, revision),
            )
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        raise SourceError(
            f"{missing[0]} is missing ({len(names) - len(missing)} of {len(names)} files named in {INDEX} are here)",
            why=f"missing in {path}: {', '.join(missing[:8])}",
            next=download_command(path, origin, missing[0], revision),
        )
    tensors: dict[str, TensorEntry] = {}
    for name in names:
        for tensor, entry in read_header(path / name, download=download_command(path, origin, name, revision)).items():
            if weight_map.get(tensor, name) == name:  # a tensor may lie in two files: the index decides
                tensors[tensor] = entry
    for tensor, name in weight_map.items():
        if tensor not in tensors:
            raise SourceError(
                f"{INDEX} places tensor {tensor} in {name}, which does not hold it",
                why="index and weight files do not belong together",
                next=download_command(path, origin, name, revision),
            )
    return tensors, [path / name for name in names]


def _adapter(path: Path) -> SourceError:
    base = read_json(path / ADAPTER_CONFIG).get("base_model_name_or_path") or "its base model"
    return SourceError(
        f"{path} is a LoRA adapter, not a whole model; its base model is {base}",
        why=f"the folder has {ADAPTER_CONFIG} and no model weights",
        next=f"merge it first: peft's AutoPeftModelForCausalLM.from_pretrained({str(path)!r}).merge_and_unload()"
        ".save_pretrained(FOLDER), then give FOLDER",
    )


def _no_config(path: Path) -> SourceError:
    why = "a Hugging Face folder holds config.json, safetensors weights and a tokenizer"
    following = "correct model.source in the recipe"
    if (path / "params.json").is_file():
        why = "params.json and consolidated weights are the original Meta or Mistral layout"
        following = "download the Hugging Face form of this model and give that folder"
    ggufs = sorted(path.glob("*.gguf"))
    if ggufs:
        following = f"give the file itself: model.source: {ggufs[0]}"
    return SourceError(f"{path} has no {CONFIG}", why=why, next=following)


def _no_weights(path: Path, origin: str, revision: str | None) -> SourceError:
    others = sorted(file.name for pattern in (*OTHER_WEIGHTS, "*.safetensors") for file in path.glob(pattern))
    found = f"found {', '.join(others[:5])}" if others else "found no weights at all"
    return SourceError(
        f"{path} has neither {WEIGHTS} nor {INDEX}",
        why=f"lpx reads safetensors weights; {found}",
        next=download_command(path, origin, WEIGHTS, revision),
    )
