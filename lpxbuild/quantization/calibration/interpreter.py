"""The interpreter that has torch, transformers and ModelOpt, asked without loading any of them."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

from lpxbuild.errors import HostError

REQUIREMENTS = {
    "nvidia-modelopt": "nvidia-modelopt==0.47.*",
    "torch": "torch>=2.8",
    "transformers": "transformers>=4.57,<5",
    "accelerate": "accelerate>=1.0",
    "requests": "requests>=2.32",
}
"""Distribution → requirement of the extra `calibrate`; transformers 5 loses RoPE settings on the way."""

_QUERY = """
import json, sys
from importlib import metadata, util
versions = {}
for name in sys.argv[1:]:
    try:
        versions[name] = metadata.version(name)
    except metadata.PackageNotFoundError:
        versions[name] = None
spec = util.find_spec("transformers")
print(json.dumps({"versions": versions, "transformers": spec and spec.submodule_search_locations[0]}))
"""


def interpreter(python: Path | None) -> Path:
    """The interpreter of the child: the recipe's, else lpx's own."""
    return python if python is not None else Path(sys.executable)


def versions(python: Path | None) -> dict[str, str | None]:
    """Distribution → version in that interpreter, None where it is not installed; all None without interpreter."""
    return dict(_asked(interpreter(python))[0])


def knows_model_type(python: Path | None, model_type: str) -> bool:
    """Whether that interpreter's transformers has a class for a config's `model_type`; read from its table's source."""
    folder = _asked(interpreter(python))[1]
    if folder is None:
        return False
    table = (Path(folder) / "models/auto/configuration_auto.py").read_text(encoding="utf-8")
    return f'"{model_type}"' in table


@cache
def _asked(python: Path) -> tuple[dict[str, str | None], str | None]:
    """(versions, folder of transformers), in a tenth of a second and without loading a package."""
    try:
        done = subprocess.run(
            [python, "-I", "-c", _QUERY, *REQUIREMENTS],
            capture_output=True,
            text=True,
            timeout=30,
            stdin=subprocess.DEVNULL,
        )
        answer = json.loads(done.stdout)
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return dict.fromkeys(REQUIREMENTS), None
    return answer["versions"], answer["transformers"]


def check_interpreter(python: Path | None) -> None:
    """Refuse an interpreter that cannot calibrate.

    Raises:
        HostError: it is not there, or lacks a package of the extra `calibrate` in a version that fits.
    """
    path = interpreter(python)
    if not path.is_file():
        raise HostError(
            f"runtime.reference_python {path} does not exist",
            why="calibration runs in an interpreter that has torch, transformers and ModelOpt",
            next=f"python3 -m venv {path.parent.parent} && {_install(path)}",
        )
    found = versions(python)
    problems = [
        f"{name} {found[name] or 'is not installed'} (needs {requirement})"
        for name, requirement in REQUIREMENTS.items()
        if not _fits(found[name], requirement)
    ]
    if problems:
        raise HostError(
            f"{path} cannot calibrate: {'; '.join(problems)}",
            why="activations are collected by NVIDIA ModelOpt (extra `calibrate`), in a process of its own",
            next=f"{_install(path)}, or name an interpreter that has it in runtime.reference_python",
        )


def _install(path: Path) -> str:
    return f"{path} -m pip install {' '.join(repr(text) for text in REQUIREMENTS.values())}"


def _fits(version: str | None, requirement: str) -> bool:
    """Whether a version meets `name==1.2.*`, or `name>=a,<b`."""
    if version is None:
        return False
    found = _numbers(version)
    for clause in requirement[len(requirement.rstrip("0123456789.,<>=*")) :].split(","):
        operator = clause.rstrip("0123456789.*")
        wanted = _numbers(clause[len(operator) :])
        if operator == "==" and found[: len(wanted)] != wanted:
            return False
        if (operator == ">=" and found < wanted) or (operator == "<" and found >= wanted):
            return False
    return True


def _numbers(text: str) -> tuple[int, ...]:
    numbers = []
    for part in text.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)
