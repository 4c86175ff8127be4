"""The command line: options → one call → render. No logic, no heavy import."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from lpxbuild.cli import build, cache, init, inspect, recipes, serve, smoke, verify
from lpxbuild.cli import version as version_command


class Commands(TyperGroup):
    """The command group; what the parser refuses is a JSON document too where one was asked for."""

    def main(self, args: Sequence[str] | None = None, prog_name: str | None = None, *rest: Any, **options: Any) -> Any:
        given = list(sys.argv[1:] if args is None else args)
        if "--json" not in given or not options.get("standalone_mode", True):
            return super().main(args, prog_name, *rest, **options)
        try:
            status = super().main(args, prog_name, *rest, **{**options, "standalone_mode": False})
        except Exception as error:
            # Typer's parser errors share no public base class over its versions.
            if not hasattr(error, "format_message"):
                raise
            from lpxbuild.errors import UsageError
            from lpxbuild.output import Output

            command = getattr(getattr(error, "ctx", None), "command_path", "lpx")
            Output("json").error(UsageError(error.format_message(), next=f"{command} -h"))
            sys.exit(UsageError.exit_code)
        sys.exit(status if isinstance(status, int) else 0)


app = typer.Typer(
    name="lpx",
    cls=Commands,
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


for module in (init, build, serve, smoke, verify, inspect, recipes, version_command):
    module.register(app)
app.add_typer(cache.app, name="cache")
