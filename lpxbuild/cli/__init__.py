"""The command line: options → one call → render. No logic, no heavy import."""

from __future__ import annotations

from typing import Annotated

import typer

from lpxbuild.cli import build, cache, init, inspect, recipes, serve, smoke

app = typer.Typer(
    name="lpx",
    help="One YAML recipe turns a Hugging Face checkpoint into a proven, served model.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        from lpxbuild.cli.versions import text

        typer.echo(text())
        raise typer.Exit()


@app.callback()
def lpx(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the versions that matter and stop.", callback=_version, is_eager=True),
    ] = False,
) -> None:
    """One YAML recipe turns a Hugging Face checkpoint into a proven, served model."""


for module in (init, build, serve, smoke, inspect, recipes):
    module.register(app)
app.add_typer(cache.app, name="cache")
