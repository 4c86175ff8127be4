"""Run by hand, in an environment with other people's packers: small quantized sources for tests/parity.

usage: quantized_sources.py FOLDER
needs: torch, transformers < 5, nvidia-modelopt 0.47, compressed-tensors 0.12; on the path the files
       auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py (auto-gptq 0.7.1) and awq/utils, awq/modules/linear/gemm.py
       (autoawq 0.2.9), which are imported alone because their packages want a GPU.
→ FOLDER/NAME/{config.json, model.safetensors, …}: one source for each method, as its tool saves it.

The plain weights follow from the tensors' names (named_weights.py), so that a test can have them too.
"""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
import types
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
from named_weights import bfloat16_bits

SIZES: dict[str, Any] = {
    "vocab_size": 32,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "attn_implementation": "eager",
}


def model(dtype: torch.dtype) -> Any:
    """The plain model: weights by their names, in bfloat16's precision."""
    config = transformers.LlamaConfig(**SIZES, architectures=["LlamaForCausalLM"])
    found = transformers.LlamaForCausalLM(config).to(dtype).eval().requires_grad_(False)
    for name, parameter in found.named_parameters():
        bits = torch.from_numpy(bfloat16_bits(name, tuple(parameter.shape)).view("int16"))
        parameter.copy_(bits.view(torch.bfloat16).to(dtype))
    return found


def prompts() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(3, SIZES["vocab_size"], (1, 24), generator=generator) for _ in range(4)]


def calibrate(found: Any) -> None:
    with torch.no_grad():
        for ids in prompts():
            found(ids)


def largest_inputs(found: Any) -> dict[str, float]:
    """Largest magnitude that each linear is given by the prompts."""
    seen: dict[str, float] = {}

    def look(name: str) -> Any:
        return lambda _module, inputs: seen.update({name: max(seen.get(name, 0.0), float(inputs[0].abs().max()))})

    for name, module in linears(found).items():
        module.register_forward_pre_hook(look(name))
    calibrate(found)
    return seen


def save(folder: Path, found: Any, tensors: dict[str, torch.Tensor], settings: dict[str, Any]) -> None:
    folder.mkdir(parents=True)
    config = found.config.to_dict()
    config |= {"architectures": ["LlamaForCausalLM"], "torch_dtype": str(found.dtype).removeprefix("torch.")}
    config.pop("dtype", None)
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config, indent=1, sort_keys=True) + "\n")
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in sorted(tensors.items())}, folder / "model.safetensors"
    )


def from_modelopt(folder: Path) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export import export_hf_checkpoint

    kv = {"quantizer_name": "*[kv]_bmm_quantizer", "cfg": {"num_bits": (4, 3), "axis": None}}
    groups = copy.deepcopy(mtq.INT4_AWQ_CFG)
    for entry in groups["quant_cfg"]:
        if entry["quantizer_name"] == "*weight_quantizer":
            entry["cfg"]["block_sizes"] = {-1: 64, "type": "static"}
    fp8 = copy.deepcopy(mtq.FP8_DEFAULT_CFG)
    fp8["quant_cfg"].append(kv)
    for name, preset in {
        "modelopt_fp8_kv": fp8,
        "modelopt_fp8_pc_pt": mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG,
        "modelopt_nvfp4": mtq.NVFP4_DEFAULT_CFG,
        "modelopt_int4_awq": groups,
        "modelopt_w4a8_awq": mtq.W4A8_AWQ_BETA_CFG,
    }.items():
        quantized = mtq.quantize(model(torch.bfloat16), copy.deepcopy(preset), calibrate)
        with torch.inference_mode():
            export_hf_checkpoint(quantized, export_dir=folder / name)
        (folder / name / "generation_config.json").unlink(missing_ok=True)


def from_compressed_tensors(folder: Path) -> None:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config

    number = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False, "strategy": "tensor"}
    token = {**number, "strategy": "token", "dynamic": True}
    four = {"num_bits": 4, "type": "int", "symmetric": True, "dynamic": False}
    eight = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": False, "strategy": "channel"}
    schemes: dict[str, tuple[str, dict[str, Any], dict[str, Any] | None]] = {
        "ct_fp8_static": ("float-quantized", number, number),
        "ct_fp8_dynamic": ("float-quantized", {**number, "strategy": "channel"}, token),
        "ct_w4a16_group": ("pack-quantized", {**four, "strategy": "group", "group_size": 64}, None),
        "ct_w4a16_channel": ("pack-quantized", {**four, "strategy": "channel"}, None),
        "ct_w4a16_asymmetric": (
            "pack-quantized",
            {**four, "symmetric": False, "strategy": "group", "group_size": 64},
            None,
        ),
        "ct_int8": ("int-quantized", eight, {**token, "type": "int"}),
    }
    for name, (kind, weights, inputs) in schemes.items():
        plain = model(torch.bfloat16)
        kv = number if name == "ct_fp8_static" else None
        config = QuantizationConfig(
            config_groups={"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
            ignore=["lm_head"],
            format=kind,
            quantization_status="compressed",
            kv_cache_scheme=kv,
        )
        apply_quantization_config(plain, config)
        largest = largest_inputs(model(torch.bfloat16))
        for parameter in plain.parameters():
            parameter.requires_grad_(False)
        for key, module in plain.named_modules():
            if hasattr(module, "weight_scale"):
                _weight_scale(module, weights)
                if hasattr(module, "input_scale"):
                    module.input_scale.fill_(largest[key] / 448)
            if kv is not None and key.endswith("self_attn"):
                module.k_scale.fill_(0.0125)
                module.v_scale.fill_(0.005)
        compressor = ModelCompressor.from_pretrained_model(plain, quantization_format=kind)
        compressor.compress_model(plain)
        tensors = {key: value for key, value in plain.state_dict().items() if "zero_point" not in key or "asym" in name}
        save(folder / name, plain, tensors, {**config.to_dict(), "quant_method": "compressed-tensors"})


def _weight_scale(module: Any, weights: dict[str, Any]) -> None:
    values = module.weight.float()
    size = weights.get("group_size") or (values.numel() if weights["strategy"] == "tensor" else values.shape[1])
    groups = (
        values.reshape(*module.weight_scale.shape[:1], -1, size) if values.numel() != size else values.reshape(1, 1, -1)
    )
    top = {("float", 8): 448.0, ("int", 4): 7.5, ("int", 8): 127.5}[weights["type"], weights["num_bits"]]
    if weights["symmetric"]:
        scales = groups.abs().amax(-1) / top
    else:
        low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
        scales = (high - low) / 15
        zeros = torch.round(-8 - low / scales.to(module.weight_scale.dtype).float()).clamp(-8, 7)
        module.weight_zero_point.copy_(zeros.reshape(module.weight_zero_point.shape))
    module.weight_scale.copy_(scales.reshape(module.weight_scale.shape))


def alone(file: Path, name: str) -> Any:
    """A module of a package, without the package."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    sys.modules[name] = found
    spec.loader.exec_module(found)
    return found


def on_path(part: str) -> Path:
    return next(Path(entry) / part for entry in sys.path if (Path(entry) / part).exists())


def linears(plain: Any) -> dict[str, torch.nn.Linear]:
    return {
        name: module
        for name, module in plain.named_modules()
        if isinstance(module, torch.nn.Linear) and name != "lm_head"
    }


def rounded(
    module: torch.nn.Linear, size: int, *, symmetric: bool
) -> tuple[torch.nn.Linear, torch.Tensor, torch.Tensor]:
    """A linear whose weight lies on unsigned 4-bit integers, with their (out, groups) scales and zero points.

    The packers expect that: their search does the rounding, and neither clamps.
    """
    grouped = module.weight.float().reshape(module.weight.shape[0], -1, size)
    if symmetric:
        scales, zeros = (grouped.abs().amax(-1) / 7.5).half(), torch.full(grouped.shape[:2], 8.0)
    else:
        low, high = grouped.amin(-1).clamp(max=0), grouped.amax(-1).clamp(min=0)
        scales = ((high - low) / 15).half()
        zeros = torch.round(-low / scales.float()).clamp(1, 15)
    step = scales.float()[..., None]
    codes = torch.clamp(torch.round(grouped / step) + zeros[..., None], 0, 15)
    found = copy.deepcopy(module).float()
    found.weight.copy_(((codes - zeros[..., None]) * step).reshape(found.weight.shape))
    return found, scales, zeros


def from_auto_gptq(folder: Path) -> None:
    packer = alone(on_path("auto_gptq/nn_modules/qlinear/qlinear_cuda_old.py"), "qlinear_cuda_old").QuantLinear
    for name, symmetric, size in (("gptq", True, 64), ("gptq_asymmetric", False, 64), ("gptq_rows", True, -1)):
        plain = model(torch.float16)
        tensors = dict(plain.state_dict())
        for key, module in linears(plain).items():
            out, into = module.weight.shape
            packed = packer(4, size, into, out, bias=False)
            whole, scales, zeros = rounded(module, size if size > 0 else into, symmetric=symmetric)
            packed.pack(whole, scales.float(), zeros, None)
            tensors.pop(f"{key}.weight")
            tensors |= {
                f"{key}.qweight": packed.qweight,
                f"{key}.qzeros": packed.qzeros,
                f"{key}.scales": packed.scales.half(),
                f"{key}.g_idx": packed.g_idx,
            }
        save(
            folder / name,
            plain,
            tensors,
            {"quant_method": "gptq", "bits": 4, "group_size": size, "sym": symmetric, "desc_act": False},
        )


def from_auto_awq(folder: Path) -> None:
    for package in ("awq", "awq.utils", "awq.modules"):
        sys.modules[package] = types.ModuleType(package)
        sys.modules[package].__path__ = []  # type: ignore[attr-defined]
    for part in ("module", "packing_utils", "utils"):
        alone(on_path(f"awq/utils/{part}.py"), f"awq.utils.{part}")
    packer = alone(on_path("awq/modules/linear/gemm.py"), "awq_gemm").WQLinear_GEMM
    plain = model(torch.float16)
    tensors = dict(plain.state_dict())
    for key, module in linears(plain).items():
        whole, scales, zeros = rounded(module, 64, symmetric=False)
        packed = packer.from_linear(whole.half(), 4, 64, scales=scales.t().contiguous(), zeros=zeros.t().contiguous())
        tensors.pop(f"{key}.weight")
        tensors |= {f"{key}.{part}": getattr(packed, part) for part in ("qweight", "qzeros", "scales")}
    settings = {"quant_method": "awq", "bits": 4, "group_size": 64, "version": "gemm", "zero_point": True}
    save(folder / "awq", plain, tensors, {**settings, "modules_to_not_convert": None})


def main() -> None:
    warnings.simplefilter("ignore")
    folder, only = Path(sys.argv[1]), sys.argv[2:]
    for make in (from_modelopt, from_compressed_tensors, from_auto_gptq, from_auto_awq):
        if not only or make.__name__ in only:
            make(folder)


if __name__ == "__main__":
    main()
