"""`lpx verify` on real builds: what it writes into the manifest, and how it ends."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from lpxbuild.pipeline import build, manifest
from lpxbuild.recipe import Recipe

# Over 20 s because the reference environment imports torch for each comparison.
pytestmark = pytest.mark.slow

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(scope="module")
def place(speaking_models: Callable[[str], Path], reference_python: Path, tmp_path_factory: Any) -> Path:
    """A folder with the recipe, its source beside it, and a build up to the engine."""
    folder: Path = tmp_path_factory.mktemp("command")
    shutil.copytree(speaking_models("llama"), folder / "model")
    recipe(folder, reference_python, "none")
    build(
        Recipe.load(folder / "none.yaml"),
        to="engine",
        recipe_path=folder / "none.yaml",
        cache_dir=folder / "cache",
        build_dir=folder / "build",
    )
    return folder


def recipe(folder: Path, python: Path, name: str, *, kind: str = "none", fail: str = "{}") -> Path:
    path = folder / f"{name}.yaml"
    path.write_text(
        f"name: {name}\n"
        "model: {source: model}\n"
        f"quantization: {{format: {kind}, group_size: 64}}\n"
        "limits: {max_input_len: 96, max_seq_len: 128, max_num_tokens: 64}\n"
        f"runtime: {{kv_cache_gib: 0.05, threads: 1, reference_python: '{python}'}}\n"
        f"verify: {{tokens: 160, prompts: [The, 'Q:'], run: never, fail: {fail}}}\n"
    )
    return path


@pytest.fixture
def lpx(place: Path) -> Run:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "lpxbuild", *arguments],
            cwd=place,
            env={**os.environ, "LPX_CACHE": str(place / "cache")},
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


class Page(HTMLParser):
    """What a page would load from elsewhere, and whether its elements are closed."""

    VOID = ("meta", "line", "circle", "rect", "path")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.loads: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if tag not in ("meta",):
            self.open.append(tag)
        self.loads += [name for name, _ in attributes if name in ("src", "href", "xlink:href")]
        self.loads += [tag] if tag in ("script", "link", "img", "iframe", "object") else []

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.loads += [name for name, _ in attributes if name in ("src", "href", "xlink:href")]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_verdict_is_evidence(place: Path, lpx: Run, tmp_path: Path) -> None:
    done = lpx("verify", "build/none", "--html", str(tmp_path / "page.html"), "--json")
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["status"] == "pass"
    assert document["ok"] is True
    assert document["wrong"] == []
    assert len(document["modules"]) == 2 + 1 + 4 * 12
    now = manifest.read(place / "build" / "none")
    assert now.data["evidence"]["verify"]["passed"] is True
    assert now.data["evidence"]["ran"] == ["verify"]
    assert now.data["evidence"]["verify"]["report"]["status"] == "pass"
    assert now.state == "built to engine"
    assert manifest.differences(place / "build" / "none", now, full=True) == []
    written = (place / "build" / "none" / "evidence" / "verify.html").read_text()
    assert written == (tmp_path / "page.html").read_text()
    page = Page()
    page.feed(written)
    assert not page.open
    assert not page.loads
    assert not re.search(r"https?://(?!www\.w3\.org)|@import|url\(", written)


def test_without_transformers_it_is_self_consistent_and_no_evidence(place: Path, lpx: Run) -> None:
    """lpx's own interpreter has no torch: nothing is claimed, and a script does not go on."""
    path = recipe(place, Path(sys.executable), "alone")
    assert lpx("build", str(path), "--to", "engine").returncode == 0
    before = (place / "build" / "alone" / "manifest.json").read_bytes()
    done = lpx("verify", "build/alone")
    assert done.returncode == 1
    assert "self-consistent" in done.stdout
    assert "lpxbuild[verify]" in done.stderr
    assert (place / "build" / "alone" / "manifest.json").read_bytes() == before


@pytest.mark.full
def test_negative_verdict_takes_the_proof(place: Path, lpx: Run, reference_python: Path) -> None:
    path = recipe(place, reference_python, "coarse", kind="int4_wo", fail="{max_kl: 0.000001}")
    assert lpx("build", str(path), "--to", "engine").returncode == 0
    done = lpx("verify", "build/coarse")
    assert done.returncode == 1
    assert "mean KL divergence" in done.stderr
    now = manifest.read(place / "build" / "coarse")
    assert now.state == "built, not proven"
    assert now.data["evidence"]["verify"]["passed"] is False


def test_changed_files_are_refused(place: Path, lpx: Run, reference_python: Path) -> None:
    copy = place / "build" / "changed"
    shutil.copytree(place / "build" / "none", copy)
    config = copy / "checkpoint" / "config.json"
    config.chmod(0o644)
    config.write_text(config.read_text() + " ")
    done = lpx("verify", "build/changed")
    assert done.returncode == 2
    assert "checkpoint/config.json" in done.stderr
    shutil.rmtree(copy)


def test_another_source_is_refused(place: Path, lpx: Run, tmp_path: Path) -> None:
    """A relative source starts from the recipe; what lies there must be what was converted."""
    done = subprocess.run(
        [sys.executable, "-m", "lpxbuild", "verify", str(place / "build" / "none")],
        cwd=tmp_path,
        env={**os.environ, "LPX_CACHE": str(place / "cache")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert "--recipe" in done.stderr
    shutil.copytree(place / "model", tmp_path / "model")
    generation = tmp_path / "model" / "generation_config.json"
    generation.write_text(generation.read_text() + " ")
    done = lpx("verify", "build/none", "--recipe", str(tmp_path / "none.yaml"))
    assert done.returncode == 2
    assert "generation_config.json differs" in done.stderr
