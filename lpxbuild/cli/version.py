"""`lpx version`: as `lpx --version`, also as JSON."""

from __future__ import annotations

import typer

from lpxbuild.cli.options import Json, Quiet
from lpxbuild.cli.running import running


def register(app: typer.Typer) -> None:
    """Add the command to the application."""
    app.command("version")(version)


def version(json: Json = False, quiet: Quiet = False) -> None:
    """Print the versions that matter."""
    with running(json, quiet) as output:
        from lpxbuild.cli.versions import text, versions

        output.result({"versions": versions()}, text())
