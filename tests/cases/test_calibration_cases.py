"""B21 and B24: a KV cache without calibration, and calibration texts that cannot be had."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lpxbuild.checkpoint import convert, read
from lpxbuild.checkpoint.unified import convert_unified
from lpxbuild.errors import LpxError, RecipeError
from lpxbuild.output import Output
from lpxbuild.quantization.calibration.datasets import check_dataset
from lpxbuild.quantization.scheme import Scheme
from lpxbuild.recipe.schema import Calibration
from lpxbuild.source import check

REFERENCE = Path(__file__).parents[2] / ".venv-ref" / "bin" / "python"
BASELINE = Path(__file__).parent / "data" / "baseline"
RECIPE = """\
name: baseline
model: {{source: {source}, dtype: bfloat16}}
backend: tensorrt
quantization: {{format: {format}, kv_cache: {kv_cache}, calibration: {{dataset: {dataset}}}}}
limits: {{max_batch_size: 4, max_input_len: 64, max_seq_len: 96}}
runtime: {{reference_python: {python}}}
"""


def test_an_int8_cache_without_data_is_refused(tmp_path):
    source = check(BASELINE, origin="baseline", need_tokenizer=True, output=Output.quiet())
    for write in (convert, convert_unified):
        with pytest.raises(RecipeError, match="kv_cache int8") as refusal:
            write(source, tmp_path / "c", dtype="bfloat16", scheme=Scheme(kv_cache="int8"), output=Output.quiet())
        assert refusal.value.next
    assert not (tmp_path / "c").exists()


def test_an_fp8_cache_without_data_is_refused_or_said(tmp_path):
    """Refused where the scale would be amax / 448; where it is at least 1.0 in any case, 1.0 with a notice."""
    source = check(BASELINE, origin="baseline", need_tokenizer=True, output=Output.quiet())
    with pytest.raises(RecipeError, match=r"kv_cache fp8.*calibration"):
        convert_unified(source, tmp_path / "u", dtype="bfloat16", scheme=Scheme(kv_cache="fp8"), output=Output.quiet())
    output = Output.quiet()
    convert(source, tmp_path / "c", dtype="bfloat16", scheme=Scheme(kv_cache="fp8"), output=output)
    assert any("scales of the FP8 KV cache are 1.0: nothing was measured" in notice for notice in output.notices)
    name = "transformer.layers.0.attention.kv_cache_scaling_factor"
    assert read(tmp_path / "c").tensor(name, 0).tolist() == [1.0]


def built(folder: Path, dataset: str) -> tuple[int, str, float]:
    """`lpx build` without network and without anybody to answer: exit status, what it said, seconds."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(source=BASELINE, format="fp8", kv_cache="fp8", dataset=dataset, python=REFERENCE))
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "lpxbuild", "build", str(recipe), "--to", "checkpoint"],
        env={**os.environ, "LPX_CACHE": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "hf")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        cwd=folder,
        timeout=60,
    )
    return done.returncode, done.stderr, time.monotonic() - begun


def test_a_dataset_that_cannot_be_fetched_is_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    begun = time.monotonic()
    with pytest.raises(LpxError) as refusal:
        check_dataset(Calibration(dataset="cnn_dailymail"), base=tmp_path, python=None)
    assert time.monotonic() - begun < 2
    assert refusal.value.exit_code in (2, 3)
    assert "cnn_dailymail" in str(refusal.value)
    assert "local .txt, .jsonl or .parquet file" in refusal.value.next


@pytest.mark.skipif(not REFERENCE.exists(), reason="no interpreter with ModelOpt (.venv-ref)")
@pytest.mark.parametrize("dataset", ["cnn_dailymail", pytest.param("nothing.txt", marks=pytest.mark.full)])
def test_a_build_whose_texts_cannot_be_had_ends_at_once(dataset, tmp_path):
    (tmp_path / "nothing.txt").write_text("")
    code, said, seconds = built(tmp_path, dataset)
    assert code in (2, 3), said
    assert seconds < 10
    assert dataset in said
    assert "local .txt, .jsonl or .parquet file" in said
    assert "Traceback" not in said
    assert not (tmp_path / "build" / "baseline" / "checkpoint").exists()
