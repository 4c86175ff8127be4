"""Run by the reference interpreter: perplexity of a model, of ModelOpt's fake-quantized form, and of lpx's weights.

usage: fake_quantized.py JOB.json with {folder, batches, text, forms: {name: {preset, group_size, ours}}, out}. ModelOpt
calibrates by itself on the batches. The weights of `ours` (safetensors: <module>.weight dequantized, .pre_quant_scale,
.activation_scale and .weight_scale_2 where the format has them) then take the place of ModelOpt's in the same model,
together with their own activation scales, so that both sides quantize activations. Everything is computed in float32.
out: JSON, {"plain": perplexity, name: {"theirs": …, "merged": …, "ours": …}}; merged: ModelOpt's model with one scale
and one set of factors for q, k and v (FP8 and NVFP4: for gate and up as well), as its export to TensorRT-LLM prepares
it.

ModelOpt's NVFP4 kernel needs a GPU; here its NVFP4QTensor, which its export uses, quantizes and dequantizes instead.
"""

from __future__ import annotations

import copy
import json
import math
import sys
import types
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export.quant_utils import preprocess_linear_fusion
from modelopt.torch.quantization.qtensor import NVFP4QTensor
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

LARGEST = {"fp8": 448.0, "int8_sq": 127.0, "w4a8_awq": 448.0, "nvfp4": 6 * 448.0}


def perplexity(model: torch.nn.Module, text: list[list[int]]) -> float:
    total, count = 0.0, 0
    for ids in text:
        batch = torch.tensor([ids])
        with torch.inference_mode():
            logits = model(batch, use_cache=False).logits[0, :-1].float()
        total += float(torch.nn.functional.cross_entropy(logits, batch[0, 1:], reduction="sum"))
        count += len(ids) - 1
    return math.exp(total / count)


def nvfp4(quantizer: torch.nn.Module) -> None:
    """Quantize with the quantizer's own amax, on a CPU."""
    scale = quantizer._amax.float() / (6 * 448)

    def forward(self: torch.nn.Module, values: torch.Tensor) -> torch.Tensor:
        packed, blocks, whole = NVFP4QTensor.quantize(values.contiguous(), 16, None, scale)
        return packed.dequantize(dtype=values.dtype, scale=blocks, double_scale=whole, block_sizes={-1: 16})

    quantizer.forward = types.MethodType(forward, quantizer)


def linears(model: torch.nn.Module):
    for name, layer in model.named_modules():
        if (
            hasattr(layer, "weight_quantizer")
            and hasattr(layer, "input_quantizer")
            and layer.weight_quantizer.is_enabled
        ):
            yield name, layer


def quantized(job: dict, form: dict) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(job["folder"], dtype="auto").eval()
    config = copy.deepcopy(getattr(mtq, form["preset"]))
    for entry in config["quant_cfg"]:
        for cfg in entry.get("cfg") if isinstance(entry.get("cfg"), list) else [entry.get("cfg")]:
            if "weight_quantizer" in entry["quantizer_name"] and cfg and cfg["num_bits"] == 4 and cfg["block_sizes"]:
                cfg["block_sizes"][-1] = form["group_size"]

    def forward_loop(model: torch.nn.Module) -> None:
        for batch in job["batches"]:
            model(torch.tensor(batch), logits_to_keep=1)

    return mtq.quantize(model, config, forward_loop)


def merged(model: torch.nn.Module, name: str) -> torch.nn.Module:
    """One scale and one set of factors for what TensorRT-LLM fuses, made by the function of ModelOpt's own export."""
    for layer in model.modules():
        if hasattr(layer, "q_proj"):
            preprocess_linear_fusion([layer.q_proj, layer.k_proj, layer.v_proj])
        if hasattr(layer, "gate_proj") and name in ("fp8", "nvfp4"):
            preprocess_linear_fusion([layer.gate_proj, layer.up_proj])
    return model


def measured(model: torch.nn.Module, name: str, text: list[list[int]]) -> float:
    """Perplexity in float32; weights are quantized once and stay so."""
    model = model.float()
    for _, layer in linears(model):
        if name == "nvfp4":
            nvfp4(layer.weight_quantizer)
            nvfp4(layer.input_quantizer)
        with torch.inference_mode():
            layer.weight.data = layer.weight_quantizer(layer.weight).clone()
    for _, layer in linears(model):
        layer.weight_quantizer.forward = lambda values: values
    return perplexity(model, text)


def main(path: str) -> None:
    job = json.loads(Path(path).read_text())
    plain = AutoModelForCausalLM.from_pretrained(job["folder"], dtype=torch.float32).eval()
    if isinstance(job["text"], dict):  # a random model knows no language but what it says itself
        torch.manual_seed(0)
        first = torch.randint(0, plain.config.vocab_size, (job["text"]["sequences"], 1))
        said = plain.generate(
            first, attention_mask=torch.ones_like(first), do_sample=True, top_k=0, max_length=job["text"]["tokens"]
        )
        job["text"] = said.tolist()
    found: dict[str, object] = {"plain": perplexity(plain, job["text"])}
    del plain
    for name, form in job["forms"].items():
        model = quantized(job, form)
        theirs = measured(copy.deepcopy(model), name, job["text"])
        model = merged(model, name)
        merged_theirs = measured(model, name, job["text"])
        ours = load_file(form["ours"])
        for module, layer in linears(model):
            layer.weight.data = ours[f"{module}.weight"]
            if name == "w4a8_awq":  # its kernel rounds the decoded weights to FP8, with the second scale
                scale = ours[f"{module}.weight_scale_2"]
                layer.weight.data = (layer.weight / scale).to(torch.float8_e4m3fn).float() * scale
            quantizer = layer.input_quantizer
            if hasattr(quantizer, "_pre_quant_scale"):
                quantizer._pre_quant_scale = ours[f"{module}.pre_quant_scale"]
            if name in LARGEST:
                quantizer._amax = (ours[f"{module}.activation_scale"] * LARGEST[name]).reshape(())
            if name == "nvfp4":
                nvfp4(quantizer)
        found[name] = {"theirs": theirs, "merged": merged_theirs, "ours": perplexity(model, job["text"])}
        print(name, found[name], flush=True)
    Path(job["out"]).write_text(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1])
