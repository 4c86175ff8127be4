"""Options that several commands share, defined once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Optional

import typer

Json = Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Print results only.")]
Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045  Typer reads the annotation at run time on Python 3.10
    typer.Option("--set", metavar="KEY=VALUE", help="Override a recipe key, e.g. --set parallel.tensor=2."),
]
BuildFolder = Annotated[Path, typer.Option("--build-dir", help="Folder that holds the builds.")]
CacheFolder = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--cache-dir", envvar="LPX_CACHE", help="Cache of artifacts; default ~/.cache/lpx."),
]
