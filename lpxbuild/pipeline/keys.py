"""The key of a stage: a hash of everything that shapes its output.

Components are kept by name, so that `--why` can say which one moved:
`input:checkpoint`, `recipe:quantization.format`, `version:openvino`, `code:checkpoint`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

KEY_LENGTH = 40
"""Hex digits of a key: 160 bits."""

NOT_INSTALLED = "not installed"


def key_of(stage: str, components: Mapping[str, str]) -> str:
    """Hex key of a stage."""
    text = json.dumps([stage, sorted(components.items())], separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY_LENGTH]


def field(recipe: Any, dotted: str) -> str:
    """One field of the recipe as canonical JSON: `quantization.format` → `"none"`."""
    value = recipe
    for part in dotted.split("."):
        value = getattr(value, part)
    return json.dumps(value, default=_plain, sort_keys=True, separators=(",", ":"), ensure_ascii=False)


def _plain(value: Any) -> Any:
    return value.model_dump(mode="json")


@cache
def version(package: str) -> str:
    """Version of an installed distribution, of `lpx` itself, or of `python` (major.minor)."""
    if package == "lpx":
        from lpxbuild import __version__

        return __version__
    if package == "python":
        import sys

        return f"{sys.version_info[0]}.{sys.version_info[1]}"
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return NOT_INSTALLED


@cache
def code(name: str) -> str:
    """Digest of the code that writes an artifact: a room of lpxbuild, or `model_repo`.

    A changed converter then never passes off an older one's output as its own.
    """
    if name == "model_repo":
        from lpxbuild.shipped import shipped

        folder = shipped("model_repo")
    else:
        folder = Path(__file__).parent.parent / name
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(f"{path.relative_to(folder).as_posix()}\0".encode())
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:KEY_LENGTH]


def inputs_of(
    name: str, reads: Iterable[str], *, files: Mapping[str, str], commit: str, digests: Mapping[str, str]
) -> dict[str, str]:
    """Digests of what a stage reads, by name.

    Args:
        name: of the stage; reads: the stages whose artifacts it reads.
        files: of the source's files; commit: of its revision on the hub.
        digests: of the artifacts that are there.
    """
    inputs = dict(files) if name == "source" else {}
    for one in reads:
        if one in digests:
            inputs[one] = digests[one]
        elif one == "source":
            inputs |= {**files, "commit": commit}
    return inputs


def components(
    recipe: Any, *, fields: Iterable[str], versions: Iterable[str], rooms: Iterable[str], inputs: Mapping[str, str]
) -> dict[str, str]:
    """All components of a stage's key."""
    return {
        **{f"input:{name}": value for name, value in inputs.items()},
        **{f"recipe:{name}": field(recipe, name) for name in fields},
        **{f"version:{name}": version(name) for name in versions},
        **{f"code:{name}": code(name) for name in rooms},
    }


def changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """One line per component that moved: `quantization.format: "none" → "int8_wo"`."""
    lines = []
    for name in sorted(old.keys() | new.keys()):
        before, after = old.get(name), new.get(name)
        if before != after:
            kind, _, label = name.partition(":")
            label = {"version": f"version of {label}", "code": f"code of {label}"}.get(kind, label)
            lines.append(f"{label}: {_shown(before)} → {_shown(after)}")
    return lines


def _shown(value: str | None) -> str:
    if value is None:
        return "(absent)"
    is_digest = len(value) >= KEY_LENGTH and all(letter in "0123456789abcdef" for letter in value)
    return value[:12] + "…" if is_digest else value
