"""What both layouts make of gaps in a calibration: experts that no text reached, inputs that were all zero."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lpxbuild.checkpoint import convert
from lpxbuild.checkpoint.unified import convert_unified
from lpxbuild.checkpoint.unified.modules import model_modules
from lpxbuild.errors import SourceError
from lpxbuild.families import family_for
from lpxbuild.quantization.calibrated import Calibration
from lpxbuild.quantization.scheme import Scheme
from lpxbuild.source import Source

sys.path.insert(0, str(Path(__file__).parent))
from tiny_checkpoint import checked, config_for, write_source  # isort: skip

Write = Callable[..., object]
LAYOUTS = pytest.mark.parametrize("write", [convert, convert_unified])
SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
MIXTRAL = {
    **SIZES,
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_local_experts": 3,
    "num_experts_per_tok": 1,
    "vocab_size": 64,
}


def source_of(config: dict[str, Any], folder: Path) -> Source:
    family = family_for(config)
    random = np.random.default_rng(3)
    tensors = {
        name: random.normal(0, 0.1, spec.shape).astype(np.float32)
        for name, spec in family.tensors(family.model_shape(config)).items()
        if spec.required
    }
    return checked(write_source(folder, config, tensors))


def calibration_of(source: Source, amax: float | None = None) -> dict[str, Any]:
    """Numbers that differ from module to module, or one largest value for all."""
    random = np.random.default_rng(4)
    modules = model_modules(source.shape)
    found: dict[str, Any] = {}
    for module in modules.linears:
        largest = random.uniform(1, 4) if amax is None else amax
        found[f"{module.name}.input_quantizer._amax"] = np.array(largest, np.float32)
        factors = np.float32(random.integers(32, 128, module.shape[1]) / 64)  # exact in bfloat16
        found[f"{module.name}.input_quantizer._pre_quant_scale"] = factors
    for attention in modules.attention:
        found |= {
            f"{attention}.{kind}_bmm_quantizer._amax": np.array(1 if amax is None else amax, np.float32)
            for kind in "kv"
        }
    return found


@pytest.mark.parametrize("format_", ["fp8", "int4_awq"])
@LAYOUTS
def test_an_expert_without_text_is_as_if_it_had_the_others_numbers(write: Write, format_: str, tmp_path: Path) -> None:
    source = source_of(MIXTRAL, tmp_path / "source")
    first = {name: value for name, value in calibration_of(source).items() if ".experts.2." not in name}
    for name in list(first):
        if ".experts.1." in name:  # one number for the two that were reached: their mean is the same
            first[name] = first[name.replace(".experts.1.", ".experts.0.")]
    copied = {name.replace(".experts.0.", ".experts.2."): value for name, value in first.items()}
    scheme = Scheme(format_, group_size=64)
    for name, numbers in (("gap", first), ("alike", {**first, **copied})):
        write(source, tmp_path / name, dtype="bfloat16", scheme=scheme, calibration=Calibration(numbers))
    (file,) = (tmp_path / "alike").glob("*.safetensors")
    assert (tmp_path / "gap" / file.name).read_bytes() == file.read_bytes()


@LAYOUTS
def test_no_expert_with_text_is_an_error(write: Write, tmp_path: Path) -> None:
    source = source_of(MIXTRAL, tmp_path / "source")
    numbers = {name: value for name, value in calibration_of(source).items() if ".experts." not in name}
    with pytest.raises(SourceError, match="the calibration has no"):
        write(
            source,
            tmp_path / "out",
            dtype="bfloat16",
            scheme=Scheme("int4_awq", group_size=64),
            calibration=Calibration(numbers),
        )


@pytest.mark.parametrize(("format_", "kv_cache"), [("fp8", "fp8"), ("nvfp4", "none"), ("int8_sq", "int8")])
@LAYOUTS
def test_inputs_that_were_all_zero_have_scales_of_one(
    write: Write, format_: str, kv_cache: str, tmp_path: Path
) -> None:
    """A scale of 0 would divide by zero in the engine."""
    if write is convert_unified and format_ == "int8_sq":
        pytest.skip("not in that layout")
    source = source_of(config_for(**SIZES), tmp_path / "source")
    numbers = Calibration(calibration_of(source, 0.0))
    write(source, tmp_path / "out", dtype="bfloat16", scheme=Scheme(format_, kv_cache), calibration=numbers)
    ends = ("activation_scaling_factor", "kv_cache_scaling_factor", "input_scale", ".k_scale", ".v_scale")
    (file,) = (tmp_path / "out").glob("*.safetensors")
    scales = [values for name, values in floats(file).items() if name.endswith(ends)]
    assert scales
    assert all(values.tolist() == [1.0] for values in scales)


def floats(file: Path) -> dict[str, Any]:
    """The float32 tensors of a safetensors file, by the format's description."""
    data = file.read_bytes()
    length = int.from_bytes(data[:8], "little")
    found = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__" and entry["dtype"] == "F32":
            begin, end = entry["data_offsets"]
            found[name] = np.frombuffer(data[8 + length + begin : 8 + length + end], "<f4")
    return found
