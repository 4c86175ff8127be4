"""`lpx --help` against a bare Typer app with the same commands, options and help mode (made here).

Alternating whole processes; prints the pairwise ratio: median, quartiles, n. Exit status 1 where the bound is missed.
"""

from __future__ import annotations

import inspect
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import get_type_hints

import typer

from lpxbuild.cli import app

ROUNDS = 25
BOUND = 1.3


def bare_app() -> str:
    """Source of a Typer app with lpx's commands and options and empty bodies."""
    made = (
        "typer.Typer(no_args_is_help=True, rich_markup_mode=None, pretty_exceptions_enable=False, "
        "context_settings={'help_option_names': ['-h', '--help']})"
    )
    lines = ["import typer", "from typing import Annotated, Optional", "", f"app = {made}"]

    def function(command: typer.models.CommandInfo, owner: str) -> None:
        hints = get_type_hints(command.callback, include_extras=True)
        parameters = []
        for name, parameter in inspect.signature(command.callback).parameters.items():
            kind, info = hints[name].__origin__, hints[name].__metadata__[0]
            # In Annotated form Typer keeps the first flag as the default.
            first = (info.default,) if isinstance(info.default, str) else ()
            flags = "".join(f"{flag!r}, " for flag in (*first, *(info.param_decls or ())))
            made_as = "Option" if isinstance(info, typer.models.OptionInfo) else "Argument"
            plain = kind.__name__ if kind in (bool, int, float, str) else "Optional[str]"
            default = parameter.default if plain in ("bool", "int", "float") else None
            required = parameter.default is inspect.Parameter.empty
            text = f"{name}: Annotated[{plain}, typer.{made_as}({flags}help={info.help!r})]"
            parameters.append(text if required else f"{text} = {default!r}")
        lines.extend([f"@{owner}.command({command.name!r})", f"def f{len(lines)}({', '.join(parameters)}):"])
        lines.extend([f"    {(command.callback.__doc__ or '')!r}", ""])

    for command in app.registered_commands:
        function(command, "app")
    for group in app.registered_groups:
        lines.append(f"{group.name} = {made}")
        for command in group.typer_instance.registered_commands:
            function(command, group.name)
        lines.append(f"app.add_typer({group.name}, name={group.name!r})")
    return "\n".join([*lines, "app()", ""])


def seconds(command: list[str]) -> float:
    """Wall time of one process."""
    start = time.perf_counter()
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
    return time.perf_counter() - start


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        bare = Path(folder) / "bare.py"
        bare.write_text(bare_app())
        ours, floor = [str(Path(sys.executable).with_name("lpx")), "--help"], [sys.executable, str(bare), "--help"]
        seconds(ours), seconds(floor)
        ratios = []
        for round_number in range(ROUNDS):
            pair = (ours, floor) if round_number % 2 else (floor, ours)
            times = {id(command): seconds(command) for command in pair}
            ratios.append(times[id(ours)] / times[id(floor)])
    low, middle, high = statistics.quantiles(ratios, n=4)
    verdict = "held" if middle <= BOUND else "MISSED"
    print(
        f"lpx --help / bare Typer app: median {middle:.2f}x  quartiles {low:.2f}-{high:.2f}  n={len(ratios)}  "
        f"(bound {BOUND}x: {verdict})"
    )
    return int(middle > BOUND)


if __name__ == "__main__":
    sys.exit(main())
