"""Mixtral in TensorRT-LLM's layout against what ModelOpt's own export wrote, bit for bit, from the same calibration.

tests/reference/mixtral_exports.py made mixtral_exports.json; the calibration is that of the unified exports.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lpxbuild import checkpoint
from lpxbuild.output import Output

sys.path.insert(0, str(Path(__file__).parent))
from unified_reference import SCHEMES, calibration, checked, digest, stored, write_source  # isort: skip

EXPORTS = json.loads(Path(__file__).with_name("mixtral_exports.json").read_text())
# ModelOpt pads the vocabulary to a multiple of 64 for AWQ and says so in vocab_size; lpx keeps the model's own.
PADDED = ("transformer.vocab_embedding.weight", "lm_head.weight")


@pytest.mark.parametrize("export", EXPORTS)
def test_every_tensor_of_every_rank(export: str, tmp_path: Path) -> None:
    name, _, ranks = export.rpartition("-")
    scheme = SCHEMES[name]
    (tmp_path / "checkpoint").mkdir()
    checkpoint.convert(
        checked(write_source("mixtral", tmp_path / "source")),
        tmp_path / "checkpoint",
        dtype="bfloat16",
        scheme=scheme,
        calibration=calibration("mixtral", name) if scheme.needs_calibration else None,
        tensor_parallel=int(ranks),
        output=Output.quiet(),
    )
    for rank, wanted in enumerate(EXPORTS[export]):
        alone = tmp_path / f"{rank}"
        alone.mkdir()
        (tmp_path / "checkpoint" / f"rank{rank}.safetensors").rename(alone / "rank.safetensors")
        found = {tensor: digest(*entry) for tensor, entry in stored(alone).items()}
        left = PADDED if scheme.format == "int4_awq" else ()
        assert {key: value for key, value in found.items() if key not in left} == {
            key: value for key, value in wanted.items() if key not in left
        }
        assert set(left) <= set(found)
