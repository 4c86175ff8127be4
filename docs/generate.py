"""Write the generated references, or check that the committed ones are up to date (`--check`)."""

from __future__ import annotations

import difflib
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args, get_type_hints

ROOT = Path(__file__).resolve().parent.parent


def recipe_schema() -> str:
    from lpxbuild.recipe.reference import json_schema

    return json_schema()


def recipe_reference() -> str:
    from lpxbuild.recipe.reference import markdown

    return markdown()


def cli_reference() -> str:
    """Commands, arguments and options, read from the functions (the look of `--help` varies with Typer's version)."""
    from lpxbuild.cli import app

    lines = [
        "# Command line reference",
        "",
        "Generated from the commands (`make docs`); `lpx COMMAND --help` says the same. Results go to stdout,",
        "everything else to stderr. `LPX_DEBUG=1` shows tracebacks, `lpx --install-completion` sets up the shell's",
        "completion, `lpx --version` prints the versions that matter. Exit codes: [exit-codes.md](exit-codes.md).",
        "",
    ]
    for command in app.registered_commands:
        lines += _command_reference("lpx", command)
    for group in app.registered_groups:
        for command in group.typer_instance.registered_commands:
            lines += _command_reference(f"lpx {group.name}", command)
    return "\n".join(lines)


def _command_reference(prefix: str, command: Any) -> list[str]:
    hints = get_type_hints(command.callback, include_extras=True)
    arguments, rows = [], []
    for name, parameter in inspect.signature(command.callback).parameters.items():
        info = hints[name].__metadata__[0]
        first = (info.default,) if isinstance(info.default, str) else ()
        flags = [*first, *(info.param_decls or ())] or [f"--{name.replace('_', '-')}"]
        kind = hints[name].__origin__
        value = "" if kind is bool else f" {info.metavar or _placeholder(kind)}"
        text = (info.help or "") + (f" Environment: `{info.envvar}`." if info.envvar else "")
        if type(info).__name__ == "ArgumentInfo":
            required = parameter.default is inspect.Parameter.empty
            arguments.append(name.upper() if required else f"[{name.upper()}]")
            rows.append(f"| `{name.upper()}` | {text} | {'required' if required else ''} |")
        else:
            default = "" if parameter.default in (None, False) else f"`{parameter.default}`"
            shown = ", ".join(f"`{flag}{value}`" for flag in flags)
            rows.append(f"| {shown} | {text} | {default} |")
    usage = " ".join([prefix, command.name, *arguments, "[OPTIONS]"])
    summary = (command.callback.__doc__ or "").strip()
    return [
        f"## {prefix} {command.name}",
        "",
        summary,
        "",
        f"```\n{usage}\n```",
        "",
        "| | | default |",
        "|---|---|---|",
        *rows,
        "",
    ]


def _placeholder(kind: Any) -> str:
    kinds = [kind, *get_args(kind)]
    for known, word in ((int, "N"), (float, "N"), (Path, "PATH")):
        if known in kinds:
            return word
    return "TEXT"


def exit_codes() -> str:
    from lpxbuild.errors import EXIT_STATUSES

    rows = [f"| {status.code} | {status.meaning} |" for status in EXIT_STATUSES]
    return "\n".join(["# Exit codes", "", "| code | meaning |", "|---|---|", *rows]) + "\n"


def formats() -> str:
    from lpxbuild.quantization import kv_cache_table, markdown_table

    return (
        "# Quantization formats\n\nGenerated from `lpxbuild/quantization/formats.py` (`make docs`). How to choose and "
        "what each needs: [quantization.md](quantization.md).\n\n"
        + markdown_table()
        + "\n## KV cache\n\n"
        + kv_cache_table()
        + "\nThe embedded engine (`openvino`) keeps its cache in float32 whatever is written: the scales are for the "
        "GPU host.\n"
    )


def families() -> str:
    from lpxbuild.engine import BACKENDS
    from lpxbuild.families.family import Family
    from lpxbuild.families.table import markdown
    from lpxbuild.quantization.sizes import NOT_FOR_EXPERTS

    def formats(family: Family) -> str:
        missing = sorted({*(NOT_FOR_EXPERTS if family.has_experts else ()), *_not_for_norm(family.norm)})
        return f"all but {', '.join(f'`{name}`' for name in missing)}" if missing else "all"

    return markdown(BACKENDS["openvino"].attention, formats)


def _not_for_norm(norm: str) -> tuple[str, ...]:
    # quantization.check_shapes refuses it: the inputs are quantized inside RMSNorm.
    return ("fp8_pc_pt",) if norm == "layer" else ()


def request_inputs() -> str:
    from lpxbuild.repository import request_inputs_table

    return (
        "# Request inputs\n\nThe optional inputs of the official layout, per backend. Generated from\n"
        "`model_repo/tensorrt_llm/tensors.json` (`make docs`). A refused input that carries something is answered\n"
        "with an error that names the tensor and the backends that honour it; nothing is accepted and ignored.\n\n"
        + request_inputs_table().rstrip()
        + "\n"
    )


GENERATED: dict[str, Callable[[], str]] = {
    "recipes/recipe.schema.json": recipe_schema,
    "docs/recipe-reference.md": recipe_reference,
    "docs/cli-reference.md": cli_reference,
    "docs/exit-codes.md": exit_codes,
    "docs/families.md": families,
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
