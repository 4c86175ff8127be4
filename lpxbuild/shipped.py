"""Folders that ship with lpx: `model_repo` (what runs inside Triton) and `recipes`.

In the wheel they lie in `lpxbuild/_data/`; in a checkout or an editable installation, beside the package.
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Literal

from lpxbuild.errors import ToolError


def shipped(name: Literal["model_repo", "recipes"]) -> Path:
    """The folder `name` on disk.

    Raises:
        ToolError: the installation lacks it, or runs from an archive that is not unpacked.
    """
    package = resources.files("lpxbuild")
    if isinstance(package, Path):
        for folder in (package / "_data" / name, package.parent / name):
            if folder.is_dir():
                return folder
    raise ToolError(
        f"this installation of lpx has no folder {name}",
        why=f"looked in {package} and beside it",
        next="install lpx again from its wheel, or run it from a complete checkout",
    )
