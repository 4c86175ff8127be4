"""What the documents say is there: links, commands, options, quoted messages."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from lpxbuild.cli import app

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")])
CODE = "\n".join(
    path.read_text(encoding="utf-8") for room in ("lpxbuild", "model_repo") for path in (ROOT / room).rglob("*.py")
)


def options_of(command: Any) -> set[str]:
    flags = {"--help", "-h"}
    hints = get_type_hints(command.callback, include_extras=True)
    for name, hint in hints.items():
        if name == "return":
            continue
        info = hint.__metadata__[0]
        first = (info.default,) if isinstance(info.default, str) else ()
        flags |= set([*first, *(info.param_decls or ())] or [f"--{name.replace('_', '-')}"])
    return flags


COMMANDS = {command.name: options_of(command) for command in app.registered_commands}
for group in app.registered_groups:
    for command in group.typer_instance.registered_commands:
        COMMANDS[f"{group.name} {command.name}"] = options_of(command)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_resolve_and_nothing_is_left_open(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert not re.search(r"\b(TRANSCRIPT|SECOND|TODO|TBD|FIXME|XXX)\b", text)
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
        if "://" not in target:
            assert (document.parent / target).exists(), target


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_commands_and_options_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    lines = [
        line.removeprefix("$ ")
        for block in re.findall(r"```[a-z]*\n(.*?)```", text, re.S)
        for line in block.split("\n")
    ]
    lines += re.findall(r"`(lpx [^`]+)`", text)
    for line in lines:
        if not line.startswith("lpx "):
            continue
        words = shlex.split(line.split("#")[0])[1:]
        known = " ".join(words[:2]) if words and words[0] == "cache" and len(words) > 1 else words[0] if words else ""
        if known.startswith("-") or known.isupper():
            continue
        assert known == "cache" or known in COMMANDS, line
        for word in words:
            if word.startswith("-") and known in COMMANDS:
                assert word.split("=")[0] in COMMANDS[known], line


def test_quoted_messages_are_in_the_code() -> None:
    text = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    table = text.split("|---|---|---|")[1].split("\n\n")[0]
    quoted = [cell for row in table.strip().splitlines() for cell in re.findall(r"`([^`]+)`", row.split("|")[1])]
    assert len(quoted) >= 10
    for message in quoted:
        if "/" not in message:
            assert message in CODE, message


def test_make_targets_are_there() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for document in DOCUMENTS:
        for target in re.findall(r"make ([a-z][a-z-]*)", document.read_text(encoding="utf-8")):
            if target in ("test", "demo", "lint", "bench", "docs", "clean", "test-all"):
                assert re.search(rf"^{target}:", makefile, re.M), target


def test_make_bench_runs_the_scripts_that_the_page_lists() -> None:
    """The loop of the Makefile starts every file of the folder without arguments; children lie below `peers`."""
    assert "for script in benchmarks/*.py" in (ROOT / "Makefile").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    scripts = {path.name for path in (ROOT / "benchmarks").glob("*.py")}
    assert scripts == set(re.findall(r"^\| `(\w+\.py)`", page, re.M))
    for path in (ROOT / "benchmarks").glob("*.py"):
        assert "sys.argv[1:]" not in path.read_text(encoding="utf-8"), path.name
