"""Largest magnitudes and non-finite numbers that a conversion reports, against numpy on the whole tensors."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from lpxbuild.checkpoint import convert
from lpxbuild.checkpoint.statistics import extent
from lpxbuild.output import Output

sys.path.insert(0, str(Path(__file__).parent))
from tiny_checkpoint import checked, config_for, hf_tensors, write_source

TYPES = [np.float32, np.float16, ml_dtypes.bfloat16]
BROKEN = "model.layers.1.mlp.down_proj.weight"


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize(
    ("values", "largest", "broken"),
    [
        ([], 0.0, 0),
        ([0.0, -0.0], 0.0, 0),
        ([1.5, -2.0], 2.0, 0),
        ([-1.0, -0.25], 1.0, 0),
        ([0.25, 3.0], 3.0, 0),
        ([np.inf, -4.0, np.nan, -np.inf], 4.0, 3),
        ([-np.inf], 0.0, 1),
        ([np.nan], 0.0, 1),
        ([-np.nan, 2.0], 2.0, 1),
    ],
)
def test_extent_of_a_few_numbers(dtype: type, values: list[float], largest: float, broken: int) -> None:
    found = extent(np.array(values, np.float32).astype(dtype))
    assert (found.largest, found.non_finite) == (largest, broken)


@pytest.mark.parametrize("stored", TYPES)
@pytest.mark.parametrize("target", ["bfloat16", "float32"])
@pytest.mark.parametrize("ranks", [1, 8])  # 4 KV heads: at 8 ranks they are there twice
def test_every_source_tensor_is_in_the_report(stored: type, target: str, ranks: int, tmp_path: Path) -> None:
    config = config_for(num_hidden_layers=2)
    tensors = {name: values.astype(stored) for name, values in hf_tensors(config).items()}
    tensors[BROKEN][3, 5], tensors[BROKEN][7, 90] = np.nan, -np.inf
    twice = "model.layers.0.self_attn.k_proj.weight"
    tensors[twice][1, 1] = np.inf
    output = Output.quiet()
    source = checked(write_source(tmp_path / "source", config, tensors), tensor_parallel=ranks)
    report = convert(source, tmp_path / "out", dtype=target, tensor_parallel=ranks, output=output)
    assert report.extents.keys() == tensors.keys()
    for name, values in tensors.items():
        wide = values.astype(np.float32)
        assert report.extents[name].largest == np.abs(wide[np.isfinite(wide)]).max(), name
        assert report.extents[name].non_finite == {BROKEN: 2, twice: 1}.get(name, 0), name
    (notice,) = [text for text in output.notices if "NaN" in text]
    assert "3 weight(s)" in notice
    assert twice in notice
    assert "1 more" in notice
    json.dumps(asdict(report), allow_nan=False)  # goes into the manifest


def test_sound_weights_need_no_notice(tmp_path: Path) -> None:
    config, output = config_for(num_hidden_layers=1), Output.quiet()
    source = checked(write_source(tmp_path / "source", config, hf_tensors(config)))
    convert(source, tmp_path / "out", dtype="float16", output=output)
    assert not any("NaN" in notice for notice in output.notices)
