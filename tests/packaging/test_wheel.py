"""What users install: sdist and wheel, in clean environments outside the checkout.

Slow: a virtual environment is made from PyPI (about a minute); nothing else shows what the wheel holds. It is one for
all tests of this file: base with numpy 1, base with numpy 2, then the extra `embedded` on top.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "tests" / "cases" / "data" / "baseline"
RECIPE = """name: tiny
model: {source: ./baseline}
limits: {max_batch_size: 4, max_input_len: 64, max_seq_len: 96}
runtime: {kv_cache_gib: 0.1}
"""


def run(*command: str, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        command, cwd=cwd, capture_output=True, text=True, check=False, timeout=400, env={**os.environ, **environment}
    )
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """(sdist, wheel), the wheel built from the sdist."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", str(folder), str(ROOT), cwd=folder)
    (sdist,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    return sdist, wheel


@pytest.fixture(scope="module")
def programs(distributions: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bin folder of a new environment outside the checkout that holds the wheel, installed with numpy 1.26."""
    folder = tmp_path_factory.mktemp("clean") / "venv"
    venv.create(folder, with_pip=True)
    pip_install(folder / "bin", str(distributions[1]), "numpy==1.26.4")
    return folder / "bin"


def pip_install(programs: Path, *requirements: str) -> None:
    run(str(programs / "python"), "-m", "pip", "install", "--quiet", *requirements, cwd=programs)


def project(folder: Path) -> Path:
    """A user's folder outside the checkout: a recipe and a model."""
    folder.mkdir()
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "baseline").mkdir()
    for file in MODEL.iterdir():
        (folder / "baseline" / file.name).write_bytes(file.read_bytes())
    return folder


def reference_digest(tmp_path: Path) -> str:
    """SHA-256 of the rank file that this checkout's own environment writes."""
    from lpxbuild import checkpoint, source
    from lpxbuild.output import Output

    checked = source.check(MODEL, origin=str(MODEL), need_tokenizer=True, output=Output.quiet())
    folder = tmp_path / "reference"
    folder.mkdir()
    checkpoint.convert(
        checked,
        folder,
        dtype="auto",
        tensor_parallel=1,
        pipeline_parallel=1,
        output=Output.quiet(),
    )
    return hashlib.sha256((folder / "rank0.safetensors").read_bytes()).hexdigest()


def test_both_distributions_hold_what_runs_inside_triton(distributions: tuple[Path, Path]) -> None:
    sdist, wheel = distributions
    names = set(zipfile.ZipFile(wheel).namelist())
    for part in (
        "lpxbuild/_data/model_repo/tensorrt_llm/model.py",
        "lpxbuild/_data/model_repo/tensorrt_llm/engine_host.py",
        "lpxbuild/_data/recipes/smollm2-135m-int8-tp3.yaml",
        "lpxbuild/_data/recipes/recipe.schema.json",
    ):
        assert part in names
    assert not [name for name in names if name.startswith(("tests/", "benchmarks/"))]
    with tarfile.open(sdist) as archive:
        assert any(name.endswith("model_repo/tensorrt_llm/engine_host.py") for name in archive.getnames())


@pytest.mark.parametrize("numpy", ["numpy==1.26.4", "numpy>=2"])
def test_base_install_converts_beside_either_numpy(programs: Path, tmp_path: Path, numpy: str) -> None:
    def packages() -> dict[str, str]:
        listed = json.loads(run(str(programs / "python"), "-m", "pip", "list", "--format=json", cwd=tmp_path))
        return {entry["name"].lower(): entry["version"] for entry in listed}

    before = packages()
    pip_install(programs, "--upgrade", numpy)
    names = packages()
    assert names["numpy"].startswith(numpy.strip("numpy=>")[0])
    # numpy moves alone: nothing in the base install bounds it.
    assert {name: version for name, version in names.items() if before.get(name) != version}.keys() <= {"numpy"}
    assert not {"torch", "transformers", "openvino", "nvidia-pytriton"} & set(names)
    work = project(tmp_path / "work")
    run(
        str(programs / "lpx"), "build", "recipe.yaml", "--to", "checkpoint", cwd=work, LPX_CACHE=str(tmp_path / "cache")
    )
    rank = work / "build" / "tiny" / "checkpoint" / "rank0.safetensors"
    # The same bytes whatever the numpy.
    assert hashlib.sha256(rank.read_bytes()).hexdigest() == reference_digest(tmp_path)


def test_embedded_install_builds_a_repository(distributions: tuple[Path, Path], programs: Path, tmp_path: Path) -> None:
    pip_install(programs, f"{distributions[1]}[embedded]")
    work = project(tmp_path / "work")
    lpx, cache = str(programs / "lpx"), str(tmp_path / "cache")
    assert "smollm2-135m-int8-tp3" in run(lpx, "recipes", cwd=work)
    run(lpx, "build", "recipe.yaml", "--to", "repository", cwd=work, LPX_CACHE=cache)
    repository = work / "build" / "tiny" / "repository"
    assert (repository / "tensorrt_llm" / "1" / "engine" / "engine.json").exists()
    assert (repository / "ensemble" / "config.pbtxt").exists()
