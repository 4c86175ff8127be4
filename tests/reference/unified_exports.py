"""Run by the reference interpreter: what ModelOpt's export_hf_checkpoint writes for tiny models.

usage: unified_exports.py FOLDER [MODEL … | HUGGING-FACE-FOLDER:EXPORT,EXPORT …]
→ FOLDER/<model>.json          {config, exports: {format: {quantization_config, hf_quant_config, tensors}}}
                               tensors: {name: "DTYPE shape sha256"}, of formats only those that "none" has not alike
  FOLDER/<model>.safetensors   what the calibration found, "<format>/<ModelOpt's name of the buffer>", and of some
                               models "<format>/logits" of the weights that were exported

The weights follow from the tensors' names (named_weights.py), so they need not be kept.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import modelopt.torch.quantization as mtq
import torch
import transformers
from modelopt.torch.export import export_hf_checkpoint
from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
from named_weights import bfloat16_bits

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "attn_implementation": "eager",
}
TWO = {**SIZES, "num_hidden_layers": 2}
EXPERTS = {"moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2}

# Class of the config, its arguments; the model class follows from the config.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", TWO),
    "llama-tied": ("LlamaConfig", {**SIZES, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True}),
    "qwen2": ("Qwen2Config", SIZES),
    "qwen3": ("Qwen3Config", {**SIZES, "head_dim": 64}),
    "gemma": ("GemmaConfig", {**SIZES, "head_dim": 64}),
    "gemma2": ("Gemma2Config", {**TWO, "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 16}),
    "gemma3": ("Gemma3TextConfig", {**TWO, "head_dim": 64, "query_pre_attn_scalar": 64, "sliding_window": 16}),
    "gpt2": ("GPT2Config", {"vocab_size": 96, "n_positions": 128, "n_embd": 128, "n_layer": 2, "n_head": 4,
                            "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager"}),
    "phi3": ("Phi3Config", SIZES),
    "starcoder2": ("Starcoder2Config", SIZES),
    "granite": ("GraniteConfig", {**SIZES, "attention_multiplier": 0.1, "embedding_multiplier": 4.0,
                                  "residual_multiplier": 0.5, "logits_scaling": 2.0}),
    "falcon": ("FalconConfig", {**{k: v for k, v in SIZES.items() if k != "intermediate_size"}, "alibi": False,
                                "new_decoder_architecture": True, "parallel_attn": True, "bias": False,
                                "num_kv_heads": 2}),
    "mixtral": ("MixtralConfig", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen2_moe": ("Qwen2MoeConfig", {**TWO, **EXPERTS, "shared_expert_intermediate_size": 256,
                                     "mlp_only_layers": [1]}),
    "qwen3_moe": ("Qwen3MoeConfig", {**SIZES, **EXPERTS, "head_dim": 64, "mlp_only_layers": []}),
}  # fmt: skip

COMPUTED = ("llama", "gpt2", "gemma2")
"""Of these also the logits at the last 8 of 80 positions are kept."""

FP8_KV = {"quantizer_name": "*[kv]_bmm_quantizer", "cfg": {"num_bits": (4, 3), "axis": None}}
INT8_KV = {"quantizer_name": "*[kv]_bmm_quantizer", "cfg": {"num_bits": 8, "axis": None}}
PRESETS = {
    "fp8": mtq.FP8_DEFAULT_CFG,
    "fp8_pc_pt": mtq.FP8_PER_CHANNEL_PER_TOKEN_CFG,
    "int8_sq": mtq.INT8_SMOOTHQUANT_CFG,
    "int4_awq": mtq.INT4_AWQ_CFG,
    "w4a8_awq": mtq.W4A8_AWQ_BETA_CFG,
    "nvfp4": mtq.NVFP4_DEFAULT_CFG,
    "w4a16_nvfp4": mtq.W4A16_NVFP4_CFG,
}
EXPORTS = ("none", "fp16", "fp8", "fp8-kv", "kv", "fp8_pc_pt", "int8_sq", "int4_awq", "int4_awq-g64", "w4a8_awq",
           "nvfp4", "nvfp4-kv", "w4a16_nvfp4")  # fmt: skip
# Only of llama: a layer left out, and two formats side by side.
EXCLUDED = ({"quantizer_name": "*layers.0.mlp.down_proj*", "enable": False},)


def made(name: str) -> torch.nn.Module:
    if name not in MODELS:
        return transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16).eval()
    kind, arguments = MODELS[name]
    config = getattr(transformers, kind)(**arguments)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    with torch.no_grad():
        for key, value in model.named_parameters():  # a tied head has the embedding's name only
            bits = bfloat16_bits(key, tuple(value.shape))
            value.copy_(torch.from_numpy(bits.view("int16")).view(torch.bfloat16))
    model.config.architectures = [type(model).__name__]
    return model.eval()


def keep_exact_factors() -> None:
    """ModelOpt smooths weights with float32 factors and then keeps them rounded: remember what it used."""
    from modelopt.torch.quantization import model_calib

    smooth = model_calib.apply_pre_quant_scale_and_smooth

    def remembering(linear: Any, pre_quant_scale: Any = None) -> None:
        smooth(linear, pre_quant_scale)
        linear.exact_factors = pre_quant_scale.to(torch.float32).clone()

    model_calib.apply_pre_quant_scale_and_smooth = remembering


def configured(export: str) -> dict[str, Any]:
    parts = export.split("-")
    if export == "kv":
        return {"quant_cfg": [{"quantizer_name": "*", "enable": False}, FP8_KV], "algorithm": "max"}
    if export == "mixed":
        config = copy.deepcopy(PRESETS["fp8"])
        config["quant_cfg"] += [
            {"quantizer_name": "*mlp*weight_quantizer", "cfg": {"num_bits": (4, 3), "axis": 0}},
            {"quantizer_name": "*mlp*input_quantizer", "cfg": {"num_bits": (4, 3), "type": "dynamic",
                                                               "block_sizes": {-1: None}}},
            FP8_KV,
        ]  # fmt: skip
        return config
    config = copy.deepcopy(PRESETS[parts[0]])
    if "g64" in parts:
        for entry in config["quant_cfg"]:
            if entry["quantizer_name"] == "*weight_quantizer" and "cfg" in entry:
                entry["cfg"]["block_sizes"] = {-1: 64}
    if "kv" in parts:
        config["quant_cfg"].append(FP8_KV)
    if "kvint8" in parts:
        config["quant_cfg"].append(INT8_KV)
    if "excluded" in parts:
        config["quant_cfg"] += EXCLUDED
    return config


def calibration(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(7)
    for _ in range(4):
        model(torch.randint(3, 90, (2, 24), generator=generator), use_cache=False)


def digests(folder: Path) -> dict[str, str]:
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        data = file.read_bytes()
        length = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + length]).items():
            if name != "__metadata__":
                begin, end = (8 + length + offset for offset in entry["data_offsets"])
                shape = "x".join(map(str, entry["shape"])) or "scalar"
                found[name] = f"{entry['dtype']} {shape} {hashlib.sha256(data[begin:end]).hexdigest()[:16]}"
    return dict(sorted(found.items()))


def fake_quantized_logits(model: torch.nn.Module) -> torch.Tensor:
    """What the weights compute as they are about to be exported, in float32; inputs are not quantized."""
    requantize_resmooth_fused_llm_layers(model)
    for key, module in model.named_modules():
        if key.endswith(("input_quantizer", "_bmm_quantizer")):
            module.disable_quant()
    ids = torch.arange(80)[None] * 7 % (model.config.vocab_size - 3) + 3
    return model.float()(ids, use_cache=False).logits[0, -8:].float().contiguous()


def exported(name: str, export: str, state: dict[str, torch.Tensor]) -> dict[str, Any]:
    model = made(name)
    if export == "fp16":
        model = model.to(torch.float16)
        model.config.dtype = torch.float16
    elif export != "none":
        model = mtq.quantize(model, configured(export), calibration)
        for key, buffer in model.named_buffers():
            if key.endswith(("input_quantizer._amax", "_bmm_quantizer._amax")):
                state[f"{export}/{key}"] = buffer.detach().clone().contiguous()
        for key, module in model.named_modules():
            if hasattr(module, "exact_factors"):
                rounded = module.input_quantizer._pre_quant_scale
                assert torch.equal(module.exact_factors.to(rounded.dtype), rounded)
                state[f"{export}/{key}.input_quantizer._pre_quant_scale"] = module.exact_factors
        # NVFP4's own fake quantization runs on CUDA only.
        if name in COMPUTED and not {"kv", "nvfp4", "w4a16_nvfp4"} & set(export.split("-")):
            with torch.inference_mode():
                state[f"{export}/logits"] = fake_quantized_logits(copy.deepcopy(model))
    with tempfile.TemporaryDirectory() as place, torch.inference_mode():
        folder = Path(place)
        export_hf_checkpoint(model, export_dir=folder)
        config = json.loads((folder / "config.json").read_text())
        file = folder / "hf_quant_config.json"
        return {
            "quantization_config": config.get("quantization_config"),
            "hf_quant_config": json.loads(file.read_text()) if file.exists() else None,
            "tensors": digests(folder),
        }


def main(folder: Path, names: list[str]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    keep_exact_factors()
    folder.mkdir(parents=True, exist_ok=True)
    for argument in names or MODELS:
        name, _, wanted = argument.partition(":")
        state: dict[str, torch.Tensor] = {}
        found: dict[str, Any] = {}
        extra = ("fp8-excluded", "nvfp4-excluded", "mixed") if name == "llama" else ()
        for export in wanted.split(",") if wanted else (*EXPORTS, *extra):
            try:
                found[export] = exported(name, export, state)
                if export != "none" and "none" in found:
                    same = found["none"]["tensors"]
                    found[export]["tensors"] = {
                        key: value for key, value in found[export]["tensors"].items() if same.get(key) != value
                    }
            except Exception as error:  # what ModelOpt cannot export stands in the record
                found[export] = {"error": f"{type(error).__name__}: {error}"}
                print(name, export, found[export]["error"], file=sys.stderr)
        config = made(name).config.to_dict()
        save_file(state, folder / f"{Path(name).name}.safetensors")
        (folder / f"{Path(name).name}.json").write_text(
            json.dumps({"config": config, "exports": found}, indent=0) + "\n"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
