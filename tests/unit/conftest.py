"""A tiny random llama, built to its repository by the command itself, for the tests of all other commands."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "server"))

RECIPE = (
    "name: tiny\nmodel: {source: model}\n"
    "limits: {max_batch_size: 8, max_input_len: 96, max_seq_len: 320, max_num_tokens: 128}\n"
    "runtime: {threads: 1, kv_cache_gib: 0.03}\n"
    "serve: {bls: false, drain_seconds: 7}\n"
    "smoke: {prompts: [{text: abc, max_tokens: 8}]}\n"
)


@dataclass
class Place:
    """A folder with a recipe and its cache, and the command run in it."""

    folder: Path
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def build(self) -> Path:
        return self.folder / "build" / "tiny"

    @property
    def repository(self) -> Path:
        return self.build / "repository"

    def surroundings(self) -> dict[str, str]:
        return {**os.environ, "LPX_CACHE": str(self.folder / "cache"), **self.environment}

    def lpx(self, *arguments: str | Path, timeout: float = 120) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "lpxbuild", *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env=self.surroundings(),
            check=False,
            timeout=timeout,
        )


@pytest.fixture(scope="session")
def tiny_place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """`lpx build --to repository` of the tiny model; nobody writes into it."""
    pytest.importorskip("openvino")
    import tiny_model

    place = Place(tmp_path_factory.mktemp("tiny"))
    tiny_model.make_source(place.folder / "model")
    (place.folder / "r.yaml").write_text(RECIPE)
    done = place.lpx("build", "r.yaml", "--to", "repository")
    assert done.returncode == 0, done.stderr
    return place
