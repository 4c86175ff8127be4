"""Unified checkpoints: their dequantized weights in transformers, with their own config, against the source."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from planting import Planted

from lpxbuild import source, verify
from lpxbuild.checkpoint.unified import convert_unified
from lpxbuild.output import Output
from lpxbuild.quantization.scheme import Scheme

# Over 20 s because transformers runs three times for each verdict; only in make test-all for that.
pytestmark = [pytest.mark.slow, pytest.mark.full]


class PlantedUnified(Planted):
    """The one file of a small unified checkpoint."""

    def tensors(self, rank: int) -> tuple[bytearray, dict[str, Any]]:
        (self.folder / "model.safetensors").rename(self.folder / "rank0.safetensors")
        try:
            return super().tensors(rank)
        finally:
            (self.folder / "rank0.safetensors").rename(self.folder / "model.safetensors")

    def change(self, change: Callable[[dict[str, Any]], None]) -> None:
        data, views = self.tensors(0)
        change(views)
        (self.folder / "model.safetensors").write_bytes(data)


@pytest.fixture(scope="module")
def unified(speaking_models: Callable[[str], Path], tmp_path_factory: Any) -> Callable[[str, str], verify.VerifyInput]:
    made: dict[tuple[str, str], verify.VerifyInput] = {}

    def build(name: str, kind: str) -> verify.VerifyInput:
        if (name, kind) not in made:
            folder = tmp_path_factory.mktemp("unified")
            checked = source.check(
                speaking_models(name),
                origin=name,
                need_tokenizer=True,
                tensor_parallel=1,
                pipeline_parallel=1,
                output=Output.quiet(),
            )
            convert_unified(checked, folder, dtype="bfloat16", scheme=Scheme(kind, group_size=64), calibration=None)
            made[name, kind] = verify.VerifyInput(speaking_models(name), folder, None, "unified_hf", 128, 1)
        return made[name, kind]

    return build


@pytest.mark.parametrize(
    ("name", "kind"),
    [("llama", "none"), ("qwen3", "fp8_pc_pt"), ("llama", "w4a16_nvfp4"), ("mixtral", "fp8_pc_pt"), ("gpt2", "none")],
)
def test_a_sound_checkpoint_is_not_accused(name: str, kind: str, unified: Any, compare: Any, tmp_path: Path) -> None:
    verdict = compare(unified(name, kind), tmp_path, really=True)
    assert verdict.ok, verdict.reasons
    assert not verdict.wrong
    assert verdict.answers[0].reference
    assert verdict.answers[0].candidate


def scale(planted: Planted) -> None:
    planted.set("model.layers.2.mlp.down_proj.weight_scale", lambda value: value * np.float32(1.05))


def k_for_v(planted: Planted) -> None:
    planted.swap("model.layers.1.self_attn.k_proj.weight", "model.layers.1.self_attn.v_proj.weight")


def base(planted: Planted) -> None:
    path = planted.folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rope_theta": 500000.0}))


@pytest.mark.parametrize(
    ("error", "module"),
    [(scale, "layers.2.mlp.proj"), (k_for_v, "layers.1.attention.qkv (k)"), (base, "layers.0.attention (positions")],
)
def test_planted_error_is_named(
    error: Callable[[Planted], None], module: str, unified: Any, compare: Any, tmp_path: Path
) -> None:
    sound = unified("llama", "fp8_pc_pt")
    copy = tmp_path / "checkpoint"
    shutil.copytree(sound.checkpoint, copy)
    planted = PlantedUnified(copy)
    error(planted)
    damaged = verify.VerifyInput(sound.source, copy, None, "unified_hf", 128, 1)
    verdict = compare(damaged, tmp_path, really=True)
    assert verdict.status == "fail"
    assert module in verdict.wrong[0].name, [f"{each.name}: {each.why}" for each in verdict.wrong[:4]]
