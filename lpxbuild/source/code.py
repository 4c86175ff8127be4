"""Python files that a model brings along (`auto_map` in its JSON files). lpx carries them and runs none of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lpxbuild.errors import SourceError
from lpxbuild.families import Family
from lpxbuild.source.folder import CONFIG, read_json

TOKENIZER_CONFIG = "tokenizer_config.json"


def code_names(path: Path, names: Iterable[str]) -> list[str]:
    """Those of `names` that loaders of the folder's model may need: all Python files of the top folder, which import
    each other, where config.json or tokenizer_config.json names some; else none."""
    if not any(_named(path / file) for file in (CONFIG, TOKENIZER_CONFIG)):
        return []
    return sorted(name for name in names if name.endswith(".py") and "/" not in name)


def code_files(path: Path) -> list[Path]:
    """The same, of the files that the folder has."""
    return [path / name for name in code_names(path, (file.name for file in path.glob("*.py") if file.is_file()))]


def check_code(path: Path, family: Family) -> None:
    """Refuse what becomes a checkpoint in Hugging Face's form that no loader could open for want of the model's code.

    Raises:
        SourceError: names the file.
    """
    if not family.remote_code:
        return
    named = sorted({f"{module}.py" for module in _named(path / CONFIG)})
    missing = [name for name in named if not (path / name).is_file()]
    if named and not missing:
        return
    raise SourceError(
        f"the source has no {missing[0]}, which auto_map of {CONFIG} names"
        if missing
        else f"{CONFIG} has no auto_map, which names the Python files of a model that transformers does not have",
        why=f"loaders of Hugging Face checkpoints run {family.name} by the code that comes with the model",
        next="get all files of the model's repository, or build for backend tensorrt or openvino",
    )


def _named(file: Path) -> list[str]:
    """Modules of the folder that a JSON file's `auto_map` names; "repository--module.Class" lies elsewhere."""
    if not file.is_file():
        return []
    auto_map = read_json(file).get("auto_map")
    values = auto_map.values() if isinstance(auto_map, Mapping) else ()
    return [name.partition(".")[0] for value in values for name in _strings(value) if "--" not in name]


def _strings(value: Any) -> Iterator[str]:
    """A tokenizer has two classes, either of which may be null."""
    for one in value if isinstance(value, list) else (value,):
        if isinstance(one, str):
            yield one
