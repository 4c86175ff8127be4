"""Write the generated references, or check that the committed ones are up to date (`--check`)."""

from __future__ import annotations

import difflib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def recipe_schema() -> str:
    from lpxbuild.recipe.reference import json_schema

    return json_schema()


def recipe_reference() -> str:
    from lpxbuild.recipe.reference import markdown

    return markdown()


def cli_reference() -> str:
    """Every command's `--help`, as a terminal of 100 columns shows it."""
    import typer

    from lpxbuild.cli import app

    lines = [
        "# Command line reference",
        "",
        "Generated from `--help` (`make docs`). Every command knows `--json` (one document on stdout) and `--quiet`;",
        "results go to stdout, everything else to stderr. `LPX_DEBUG=1` shows tracebacks, `LPX_CACHE` names the cache.",
        "",
    ]

    def describe(command: Any, path: list[str]) -> None:
        environment = {**os.environ, "COLUMNS": "100", "TERMINAL_WIDTH": "100", "LPX_CACHE": ""}
        shown = subprocess.run(
            [sys.executable, "-m", "lpxbuild", *path[1:], "--help"],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
            cwd=ROOT,
        ).stdout.replace("python -m lpxbuild", "lpx")
        lines.extend([f"{'#' * (len(path) + 1)} {' '.join(path)}", "", "```", shown.strip(), "```", ""])
        for name, inner in getattr(command, "commands", {}).items():
            describe(inner, [*path, name])

    describe(typer.main.get_command(app), ["lpx"])
    return "\n".join(lines)


def exit_codes() -> str:
    from lpxbuild.errors import EXIT_STATUSES

    rows = [f"| {status.code} | {status.meaning} |" for status in EXIT_STATUSES]
    return "\n".join(["# Exit codes", "", "| code | meaning |", "|---|---|", *rows]) + "\n"


def formats() -> str:
    from lpxbuild.quantization import formats_table

    return formats_table()


def request_inputs() -> str:
    from lpxbuild.repository import request_inputs_table

    return request_inputs_table()


GENERATED: dict[str, Callable[[], str]] = {
    "recipes/recipe.schema.json": recipe_schema,
    "docs/recipe-reference.md": recipe_reference,
    "docs/cli-reference.md": cli_reference,
    "docs/exit-codes.md": exit_codes,
    "docs/formats.md": formats,
    "docs/request-inputs.md": request_inputs,
}


def main() -> int:
    """0 when everything is up to date (or was written), 1 with a diff otherwise."""
    check = "--check" in sys.argv[1:]
    stale = False
    for name, write in GENERATED.items():
        path = ROOT / name
        wanted, found = write(), path.read_text(encoding="utf-8") if path.exists() else ""
        if wanted == found:
            continue
        if check:
            stale = True
            sys.stderr.writelines(
                difflib.unified_diff(
                    found.splitlines(True), wanted.splitlines(True), f"{name} (committed)", f"{name} (generated)", n=1
                )
            )
        else:
            path.write_text(wanted, encoding="utf-8")
            sys.stdout.write(f"wrote {name}\n")
    if stale:
        sys.stderr.write("generated files are stale; run: make docs\n")
    return int(stale)


if __name__ == "__main__":
    sys.exit(main())
