"""The `parameters` of each config.pbtxt: one row per key, written by `render` and checked by `validate`.

Triton passes them on as text, and the official backend takes "12abc" for 12 and anything that is no boolean for the
default. So lpx writes one spelling per kind and accepts no other.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

from lpxbuild.repository.settings import RepositorySettings
from lpxbuild.repository.tensors import BLS, ENSEMBLE, POSTPROCESSING, PREPROCESSING, TENSORRT_LLM

Kind = Literal["boolean", "count", "folder", "program", "model"]


@dataclass(frozen=True)
class Parameter:
    """One key: what kind of value it takes and where the value comes from."""

    key: str
    kind: Kind
    value: Callable[[RepositorySettings], str]


def _boolean(value: bool) -> str:
    return "true" if value else "false"


# Folders are relative to the model's version folder, so that a repository copied elsewhere still serves.
_TOKENIZER = Parameter("tokenizer_dir", "folder", lambda _: "tokenizer")
_SKIP = Parameter("skip_special_tokens", "boolean", lambda settings: _boolean(settings.skip_special_tokens))

# No recipe key sets exclude_input_in_output (each request says it) and accumulate_tokens (whole text so far in each
# response of BLS): they are written for those who know them from the official layout and edit the file.
PARAMETERS: dict[str, tuple[Parameter, ...]] = {
    PREPROCESSING: (
        _TOKENIZER,
        Parameter("add_special_tokens", "boolean", lambda settings: _boolean(settings.add_special_tokens)),
    ),
    TENSORRT_LLM: (
        Parameter("gpt_model_path", "folder", lambda _: "engine"),
        _TOKENIZER,
        Parameter("engine_python", "program", lambda settings: settings.engine_python),
        _SKIP,
        Parameter("exclude_input_in_output", "boolean", lambda _: "false"),
        Parameter("max_beam_width", "count", lambda settings: str(settings.max_beam_width)),
    ),
    POSTPROCESSING: (_TOKENIZER, _SKIP),
    ENSEMBLE: (),
    BLS: (
        Parameter("accumulate_tokens", "boolean", lambda _: "false"),
        Parameter("tensorrt_llm_model_name", "model", lambda _: TENSORRT_LLM),
    ),
}


def problem(kind: Kind, value: str, version_folder: Path) -> str | None:
    """What is wrong with a value, or None.

    Args:
        value: the parameter's text.
        version_folder: `<repository>/<model>/1`, that relative folders start from.
    """
    return _CHECKS[kind](value, version_folder)


def _check_boolean(value: str, _: Path) -> str | None:
    return None if value in ("true", "false") else f"{value!r} is not a boolean; write true or false"


def _check_count(value: str, _: Path) -> str | None:
    if re.fullmatch(r"[1-9][0-9]*", value):
        return None
    return f"{value!r} is not a whole number of at least 1; the server would read its leading digits or a default"


def _check_folder(value: str, version_folder: Path) -> str | None:
    path = PurePosixPath(value)
    if not value or path.is_absolute() or ".." in path.parts:
        return f"{value!r} must be a folder inside {version_folder.name}/, given relative to it"
    if not (version_folder / path).is_dir():
        return f"the folder {value!r} does not exist in {version_folder}"
    return None


def _check_program(value: str, _: Path) -> str | None:
    # A relative path would be looked up from the directory in which the server happens to be started.
    if not value or ((Path(value).is_absolute() or "/" not in value) and shutil.which(value)):
        return None
    return f"{value!r} is no program here; give an absolute path, or nothing for the first python3 in PATH"


def _check_model(value: str, version_folder: Path) -> str | None:
    if value and "/" not in value and (version_folder.parent.parent / value / "config.pbtxt").is_file():
        return None
    return f"the repository has no model {value!r}"


_CHECKS: dict[Kind, Callable[[str, Path], str | None]] = {
    "boolean": _check_boolean,
    "count": _check_count,
    "folder": _check_folder,
    "program": _check_program,
    "model": _check_model,
}
