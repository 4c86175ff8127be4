"""From what a recipe names (hub id, folder, `.gguf`, file of a Python package) to a checked Hugging Face folder.

`fetch` brings the folder here, `check` compares everything in it before a weight is read.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from lpxbuild.errors import SourceError
from lpxbuild.output import Output
from lpxbuild.source.checks import check, check_config
from lpxbuild.source.folder import is_repository, read_config, tokenizer_files
from lpxbuild.source.package import PREFIX, find_in_package
from lpxbuild.source.quantized import settings_of
from lpxbuild.source.records import Source, SourceFile, TensorEntry

__all__ = [
    "Source",
    "SourceFile",
    "TensorEntry",
    "check",
    "check_config",
    "fetch",
    "is_quantized",
    "local_file",
    "tokenizer_files",
]


def is_quantized(folder: Path) -> bool:
    """Whether the weights of a Hugging Face folder are quantized already, as far as its settings say.

    Raises:
        SourceError: no such folder, or a method that lpx does not read.
    """
    return settings_of(folder, read_config(folder)) is not None


def local_file(source: str) -> Path | None:
    """The file or folder of this host that a recipe's `model.source` means; None for a hub id.

    A path wins over a hub id of the same spelling, as in transformers.

    Raises:
        SourceError: looks like a path, but nothing is there.
        HostError: a Python package that is not installed.
    """
    if source.startswith(PREFIX):
        return find_in_package(source)
    try:
        path = Path(source).expanduser()
    except RuntimeError:  # ~somebody, and nobody of that name is here
        path = Path(source)
    if path.exists():
        return path
    if is_repository(source) and not source.endswith(".gguf"):
        return None
    raise SourceError(
        f"no such file or folder: {source}",
        why="a source is a hub id (organisation/name), a Hugging Face folder, a .gguf file or python-package:NAME/FILE",
        next="correct model.source in the recipe",
    )


def fetch(
    source: str,
    revision: str | None,
    *,
    destination: Path | None = None,
    dtype: str = "auto",
    accept: Callable[[Path], object] = check_config,
    output: Output,
) -> Path:
    """A Hugging Face folder on this host.

    Args:
        source: hub id, folder, `.gguf` file or `python-package:NAME/FILE`.
        revision: branch, tag or commit of a hub repository.
        destination: where a `.gguf` is converted to (needed for one; must not exist or be empty), and where hub files
            go (None: the cache shared by Hugging Face tools). A folder is used where it lies.
        dtype: what a `.gguf` becomes: `auto`, `float32`, `bfloat16` or `float16`. Without meaning for the others.
        accept: refuses a hub model by its small files, before its weights are downloaded.

    Raises:
        SourceError, HostError: with what, why and the next command.
    """
    path = local_file(source)
    if path is None:
        from lpxbuild.source.hub import fetch_repository

        return fetch_repository(source, revision, destination=destination, accept=accept, output=output)
    if revision is not None:
        output.notice(f"model.revision {revision} has no meaning for the local source {source}")
    if path.is_dir():
        return path
    if path.suffix != ".gguf":
        raise SourceError(
            f"{source} is a file, but not a .gguf",
            why="a single file can only be a GGUF model",
            next="give the folder with config.json, the safetensors files and the tokenizer",
        )
    from lpxbuild.source.gguf import convert_gguf

    if destination is None:
        raise ValueError("a .gguf needs a destination")
    return convert_gguf(path, destination, dtype=dtype, output=output)
