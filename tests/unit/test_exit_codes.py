"""Every row of the table of exit statuses, by a real command; a new row without a scenario fails."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lpxbuild.errors import EXIT_STATUSES

ROOT = Path(__file__).parents[2]
BASELINE = ROOT / "tests" / "cases" / "data" / "baseline"
STANDINS = ROOT / "tests" / "standins"
BUG = (
    "import lpxbuild.recipe.library as library\nlibrary.shipped_recipes = lambda: 1 / 0\n"
    "from lpxbuild.__main__ import main\nmain()\n"
)

Result = tuple[int, str]


@pytest.fixture
def place(tmp_path: Path) -> Path:
    shutil.copytree(BASELINE, tmp_path / "model")
    (tmp_path / "r.yaml").write_text("name: tiny\nmodel: {source: model}\n")
    return tmp_path


def run(place: Path, line: str, **environment: str) -> Result:
    """A shell line with `$LPX` as the command; (status, stderr)."""
    done = subprocess.run(
        ["bash", "-c", line],
        capture_output=True,
        text=True,
        cwd=place,
        env={
            **os.environ,
            "LPX": f"{sys.executable} -m lpxbuild",
            "PY": sys.executable,
            "PYTHONPATH": str(ROOT),
            "LPX_CACHE": str(place / "cache"),
            **environment,
        },
        check=False,
        timeout=120,
    )
    return done.returncode, done.stderr


def stopped(place: Path, number: int) -> Result:
    process = subprocess.Popen(
        [sys.executable, str(STANDINS / "pipeline_stages.py"), "build", "r.yaml"],
        cwd=place,
        env={**os.environ, "LPX_CACHE": str(place / "cache"), "PYTHONPATH": str(ROOT), "LPX_TEST_WAIT": "checkpoint"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # Whoever runs the tests in the background of a shell ignores SIGINT, and so would the command.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    said = ""
    for line in process.stderr:
        said += line
        if line.startswith("AT checkpoint"):
            process.send_signal(number)
    return process.wait(timeout=60), said


def damaged(place: Path, _tiny: object) -> Result:
    assert run(place, "$LPX build r.yaml --to checkpoint")[0] == 0
    (rank,) = (place / "cache").glob("checkpoint/*/files/rank0.safetensors")
    rank.chmod(0o644)
    rank.write_bytes(rank.read_bytes()[:-1] + b"?")
    return run(place, "$LPX cache verify")


def dead_server(place: Path, tiny) -> Result:
    """tritonserver ends by itself because a model of the repository cannot be imported."""
    repository = place / "repository"
    shutil.copytree(tiny.repository, repository)
    model = repository / "preprocessing" / "1" / "model.py"
    model.write_text(model.read_text() + "\nraise ValueError('the moon is full')\n")
    status, said = run(place, "$LPX serve repository --http-port 0 --grpc-port 0 --metrics-port 0")
    assert "the moon is full" in said
    assert str(place) in said  # its log
    return status, said


def bug(place: Path, _tiny: object) -> Result:
    status, said = run(place, f'$PY -c "{BUG}" recipes')
    assert "a bug in lpx: ZeroDivisionError" in said
    assert "LPX_DEBUG=1" in said
    _, loud = run(place, f'$PY -c "{BUG}" recipes', LPX_DEBUG="1")
    assert "Traceback" in loud
    return status, said


SCENARIOS: dict[int, Callable[[Path, object], Result]] = {
    0: lambda place, _tiny: run(place, "$LPX recipes"),
    1: damaged,
    2: lambda place, _tiny: run(place, "$LPX build nowhere.yaml"),
    # A disk that takes no more, as a limit of the process: the rank file is larger than 8 KiB.
    3: lambda place, _tiny: run(place, "ulimit -f 8; $LPX build r.yaml --to checkpoint"),
    4: dead_server,
    70: bug,
    130: lambda place, _tiny: stopped(place, signal.SIGINT),
    143: lambda place, _tiny: stopped(place, signal.SIGTERM),
}


@pytest.mark.parametrize("code", [row.code for row in EXIT_STATUSES])
def test_row(code: int, place: Path, request: pytest.FixtureRequest) -> None:
    assert code in SCENARIOS, f"no scenario for exit status {code}"
    status, said = SCENARIOS[code](place, request.getfixturevalue("tiny_place") if code == 4 else None)
    assert status == code, said
    assert "Traceback" not in said
    if code:
        assert [line[:8] for line in said.splitlines()].count("  next: ") == 1


def test_every_scenario_is_a_row() -> None:
    assert set(SCENARIOS) == {row.code for row in EXIT_STATUSES}
