"""Calibrations against ModelOpt run by hand on the same texts, and against keys and values as transformers has them."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from lpxbuild.errors import HostError, ToolError
from lpxbuild.output import Output
from lpxbuild.quantization.calibrated import read_calibration
from lpxbuild.quantization.calibration import calibrate
from lpxbuild.quantization.calibration.run import batched, run_child, token_ids
from lpxbuild.quantization.scheme import Scheme
from lpxbuild.recipe.schema import Calibration

sys.path.insert(0, str(Path(__file__).parent))
import calibration_reference as reference

BASELINE = Path(__file__).parents[1] / "cases" / "data" / "baseline"
ORACLE = Path(__file__).parent / "oracle"
LINES = [
    f"Line {number}: {word} " * number
    for number, word in enumerate(["the", "cat", "sat", "on", "a", "mat", "all", "day"], 1)
]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """Eight lines of text, beside the recipe."""
    (tmp_path / "lines.txt").write_text("\n".join(LINES) + "\n")
    return tmp_path


def calibrated(lines: Path, name: str, scheme: Scheme, python: Path) -> Path:
    destination = lines / name
    calibrate(
        BASELINE,
        destination,
        scheme=scheme,
        settings=Calibration(dataset="lines.txt", sequence_length=24),
        base=lines,
        python=python,
        log=lines / f"{name}.log",
        output=Output.quiet(),
    )
    return destination


@pytest.mark.slow  # torch, transformers and ModelOpt are loaded by two processes, one after the other
def test_two_formats_and_a_cache(lines: Path, reference_python: Path) -> None:
    """One calibration of a mixed model is that of each format alone, and keys and values are those of transformers."""
    scheme = Scheme("int8_sq", "int8", overrides={"*.layers.1.*": "fp8"})
    folder = calibrated(lines, "mixed", scheme, reference_python)
    record = json.loads((folder / "calibration.json").read_text())
    batches = batched(token_ids(BASELINE, _order(record), 24))
    theirs = reference.run(
        reference_python,
        lines / "theirs",
        {
            "sq": reference.Job(BASELINE, Scheme("int8_sq"), batches),
            "fp8": reference.Job(BASELINE, Scheme("fp8", "int8"), batches),
            "cached": reference.Job(BASELINE, None, batches),
        },
    )
    ours = load_file(folder / "scales.safetensors")
    wanted = {name: array for name, array in theirs["sq"].items() if ".layers.0." in name}
    wanted |= {name: array for name, array in theirs["fp8"].items() if ".layers.1." in name or "bmm" in name}
    reference.assert_same(ours, wanted)
    weights = load_file(BASELINE / "model.safetensors")
    reference.assert_smooths(ours, {name: wanted[name] for name in wanted if "smoothed" in name}, weights)
    assert record["texts"] == 8
    assert record["tokens"] == sum(len(ids) for batch in batches for ids in batch)
    assert record["inputs"]["reference nvidia-modelopt"].startswith("0.47")
    assert sorted(file.name for file in folder.iterdir()) == ["calibration.json", "scales.safetensors"]

    calibration = read_calibration(folder)
    layers = [calibration.key_value_amax(f"model.layers.{number}.self_attn") for number in range(2)]
    for number, amax in enumerate(layers):
        for kind, found in zip("kv", amax):
            assert found == pytest.approx(float(theirs["cached"][f"{number}.{kind}"]), rel=0.05)
    assert len({max(amax) for amax in layers}) == 2  # each layer has its own


def _order(record: dict[str, object]) -> list[str]:
    """The lines in the order in which the seed puts them."""
    from lpxbuild.quantization.calibration.datasets import chosen

    return [f"{line}\n" for line in chosen(LINES, 128, record["settings"]["seed"])]  # type: ignore[index]


def test_the_child_does_not_outlive_lpx(tmp_path: Path, reference_python: Path) -> None:
    """Killed without a chance to say so to anybody."""
    program = (
        "import sys; from pathlib import Path\n"
        "from lpxbuild.output import Output\n"
        "from lpxbuild.quantization.calibration.run import run_child\n"
        "from lpxbuild.quantization.scheme import Scheme\n"
        "place = Path(sys.argv[1])\n"
        "run_child(Path(sys.argv[2]), place / 'out', scheme=Scheme('fp8'), batches=[[[1]]], device='cpu', seed=0,"
        " python=Path(sys.argv[3]), log=place / 'log', output=Output.quiet())\n"
    )
    lpx = subprocess.Popen([sys.executable, "-c", program, tmp_path, BASELINE, reference_python])
    try:
        job = tmp_path / "out" / "child" / "job.json"
        child = _wait_for(lambda: _process_with(str(job)))
        time.sleep(0.5)  # the child's first lines
    finally:
        lpx.send_signal(signal.SIGKILL)
        lpx.wait()
    _wait_for(lambda: not Path(f"/proc/{child}").exists() or None)


def _process_with(argument: str) -> int | None:
    for folder in Path("/proc").iterdir():
        try:
            if folder.name.isdigit() and argument.encode() in (folder / "cmdline").read_bytes().split(b"\0"):
                return int(folder.name)
        except OSError:
            continue
    return None


def _wait_for(found):  # type: ignore[no-untyped-def]
    end = time.monotonic() + 30
    while (value := found()) is None:
        assert time.monotonic() < end
        time.sleep(0.02)
    return value


@pytest.mark.full
def test_the_same_numbers_come_out_twice(tmp_path: Path, reference_python: Path) -> None:
    """Two interpreters (half a minute), with AWQ's search and a cache."""
    batches = json.loads((ORACLE / "calibration" / "ids.json").read_text())
    found = []
    for name in ("one", "two"):
        run_child(
            ORACLE / "in" / "llama-h256",
            tmp_path / name,
            scheme=Scheme("w4a8_awq", "int8"),
            batches=batches,
            device="cpu",
            seed=0,
            python=reference_python,
            log=tmp_path / "log",
            output=Output.quiet(),
        )
        found.append((tmp_path / name / "scales.safetensors").read_bytes())
    assert found[0] == found[1]


@pytest.mark.full
def test_a_model_that_computes_no_numbers(lines: Path, reference_python: Path) -> None:
    """A layer of zeros: a scale of zero would divide by zero; the module behind it is named, and nothing is kept."""
    model = lines / "model"
    shutil.copytree(BASELINE, model)
    weights = load_file(model / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = np.zeros_like(weights[name])
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ToolError) as error:
        calibrate(
            model,
            lines / "out",
            scheme=Scheme("fp8"),
            settings=Calibration(dataset="lines.txt", sequence_length=24),
            base=lines,
            python=reference_python,
            log=lines / "child.log",
            output=Output.quiet(),
        )
    assert "model.layers.1.mlp.down_proj.input_quantizer._amax" in str(error.value)
    assert "zeros, inf or nan" in str(error.value)
    assert str(lines / "child.log") in str(error.value)
    assert not list((lines / "out").iterdir())


@pytest.mark.full
def test_a_host_without_a_gpu(lines: Path, reference_python: Path) -> None:
    with pytest.raises(HostError, match="torch sees no CUDA GPU here"):
        calibrate(
            BASELINE,
            lines / "out",
            scheme=Scheme("fp8"),
            settings=Calibration(dataset="lines.txt", device="cuda:1"),
            base=lines,
            python=reference_python,
            log=lines / "child.log",
            output=Output.quiet(),
        )


@pytest.mark.full
def test_keys_and_values_that_modelopt_does_not_see(tmp_path: Path, reference_python: Path, tiny_models: Path) -> None:
    """Falcon's attention: what transformers caches is measured instead."""
    batches = [[[5, 9, 77, 31, 200], [8, 1, 99, 300, 4]], [[17, 18, 19, 20]]]
    folder = tiny_models / "falcon"
    run_child(
        folder,
        tmp_path / "out",
        scheme=Scheme("none", "fp8"),
        batches=batches,
        device="cpu",
        seed=0,
        python=reference_python,
        log=tmp_path / "log",
        output=Output.quiet(),
    )
    ours = load_file(tmp_path / "out" / "scales.safetensors")
    theirs = reference.run(reference_python, tmp_path / "theirs", {"kv": reference.Job(folder, None, batches)})["kv"]
    found = {
        f"{name.split('.')[2]}.{name.split('.')[-2][0]}": float(value)
        for name, value in ours.items()
        if name.endswith("_bmm_quantizer._amax")
    }
    assert found == {name: pytest.approx(float(value), rel=1e-6) for name, value in theirs.items()}
