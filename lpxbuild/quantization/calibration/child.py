"""Run by the interpreter that has torch, transformers and ModelOpt; imports nothing of lpxbuild.

usage: child.py JOB.json. Says `total N` and then `done n` (tokens) on stdout; everything else goes to stderr, what went
wrong last of all.

ModelOpt's numbers as NVIDIA's own exporter would use them: the largest input of each linear layer, the factors of AWQ
and SmoothQuant, the largest keys and values. ModelOpt collects with quantizers switched off, so the numbers of one
layer do not depend on the format of another.
"""

from __future__ import annotations

import copy
import ctypes
import inspect
import json
import os
import re
import signal
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

MODEL_REFUSED, HOST_LACKS = 2, 3
"""Exit statuses that lpx translates; any other but 0 is a failure."""

# Format → how its activations are found; absent = it needs none.
METHODS = {"fp8": "max", "nvfp4": "max", "int8_sq": "smoothquant", "int4_awq": "awq", "w4a8_awq": "awq_fp8"}
PRESETS = {
    "max": "FP8_DEFAULT_CFG",
    "smoothquant": "INT8_SMOOTHQUANT_CFG",
    "awq": "INT4_AWQ_CFG",
    "awq_fp8": "W4A8_AWQ_BETA_CFG",
}
RUNS = {"awq": 2, "awq_fp8": 2}
"""How often ModelOpt runs the texts, where that is not once: AWQ looks first and searches then."""
KV_BITS: dict[str, Any] = {"fp8": (4, 3), "int8": 8}
LARGEST_INPUT, FACTORS = ".input_quantizer._amax", ".input_quantizer._pre_quant_scale"


class Refused(Exception):
    """Ends the child with a status and a last line."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def method_of(job: dict[str, Any], module: str) -> str | None:
    """How the input of a linear layer is calibrated."""
    name = next((name for pattern, name in job["overrides"].items() if fnmatchcase(module, pattern)), job["format"])
    return METHODS.get(name)


def methods_of(job: dict[str, Any]) -> list[str | None]:
    """One run of the model each; a KV cache alone needs one without linear layers."""
    found = {METHODS[name] for name in (job["format"], *job["overrides"].values()) if name in METHODS}
    return [*sorted(found)] or [None]


def configuration(mtq: Any, method: str | None, kv_cache: str, group_size: int) -> dict[str, Any]:
    """ModelOpt's preset with this group size and KV cache; without method, the KV cache alone."""
    if method is None:
        config: dict[str, Any] = {"quant_cfg": [{"quantizer_name": "*", "enable": False}], "algorithm": "max"}
    else:
        config = copy.deepcopy(getattr(mtq, PRESETS[method]))
    if method in ("awq", "awq_fp8"):
        for cfg in weight_settings(config["quant_cfg"]):
            if cfg.get("block_sizes") and cfg.get("num_bits") == 4:
                cfg["block_sizes"] = {**cfg["block_sizes"], -1: group_size}
    if kv_cache != "none":
        cfg = {"num_bits": KV_BITS[kv_cache], "axis": None}
        config["quant_cfg"].append({"quantizer_name": "*[kv]_bmm_quantizer", "cfg": cfg})
    return config


def weight_settings(entries: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The settings of the weights' quantizers, one or several in a row."""
    for entry in entries:
        if entry["quantizer_name"].endswith("weight_quantizer") and "cfg" in entry:
            yield from entry["cfg"] if isinstance(entry["cfg"], list) else [entry["cfg"]]


def remember_factors() -> None:
    """ModelOpt divides weights by float32 factors, then keeps them rounded to the model's type: keep what it used."""
    from modelopt.torch.quantization import model_calib

    original = model_calib.apply_pre_quant_scale_and_smooth

    def remembering(linear: Any, pre_quant_scale: Any = None) -> None:
        original(linear, pre_quant_scale)
        if pre_quant_scale is not None:
            linear.used_factors = pre_quant_scale.detach().float().clone()

    model_calib.apply_pre_quant_scale_and_smooth = remembering


def collected(model: Any, method: str | None, wanted: Callable[[str], bool]) -> dict[str, Any]:
    """Numbers of the linears that `wanted` names."""
    found: dict[str, Any] = {}
    silent: list[str] = []
    for name, layer in model.named_modules():
        if method is None or not wanted(name) or not is_quantized_linear(layer):
            continue
        quantizer = layer.input_quantizer
        if method != "max" and method is not None:
            factors = getattr(layer, "used_factors", getattr(quantizer, "_pre_quant_scale", None))
            if factors is None:
                raise Refused(1, f"ModelOpt found no factors for the inputs of {name}")
            found[name + FACTORS] = factors.detach().float().reshape(-1)
        if method != "awq":
            if getattr(quantizer, "_amax", None) is None:
                silent.append(name)
            else:
                found[name + LARGEST_INPUT] = quantizer._amax.detach()
    for name in silent:
        found[name + LARGEST_INPUT] = of_the_other_experts(name, found)
    return {name: tensor.cpu().contiguous().clone() for name, tensor in found.items()}


def is_quantized_linear(layer: Any) -> bool:
    return (
        hasattr(layer, "input_quantizer") and hasattr(layer, "weight_quantizer") and layer.weight_quantizer.is_enabled
    )


def of_the_other_experts(name: str, found: dict[str, Any]) -> Any:
    """The largest input that any expert of the layer saw, for one that no token was sent to; so ModelOpt's export."""
    pattern = re.compile(re.sub(r"experts\\\.\d+", r"experts\\.\\d+", re.escape(name + LARGEST_INPUT)))
    seen = [tensor for other, tensor in found.items() if pattern.fullmatch(other)]
    if not seen:
        raise Refused(1, f"no text reached {name}: take more or longer texts (samples, sequence_length)")
    return max(seen, key=float)


def keys_and_values(model: Any, batches: list[Any]) -> dict[str, Any]:
    """Largest keys and values of every attention layer."""
    layers = [(name, layer) for name, layer in model.named_modules() if hasattr(layer, "k_bmm_quantizer")]
    if not layers:
        return cached_keys_and_values(model, batches)
    found = {}
    for name, layer in layers:
        for kind in "kv":
            amax = getattr(getattr(layer, f"{kind}_bmm_quantizer"), "_amax", None)
            if amax is None:
                raise Refused(MODEL_REFUSED, f"ModelOpt saw no keys and values in {name} of {type(model).__name__}")
            found[f"{name}.{kind}_bmm_quantizer._amax"] = amax.detach().cpu().contiguous().clone()
    return found


def cached_keys_and_values(model: Any, batches: list[Any]) -> dict[str, Any]:
    """As transformers hands them to its cache, for attention classes that ModelOpt has no quantizers for (Falcon)."""
    import torch

    names = {layer.layer_idx: name for name, layer in model.named_modules() if "Attention" in type(layer).__name__}
    found: dict[str, Any] = {}
    for batch in batches:
        with torch.inference_mode():
            cache = run(model, batch, use_cache=True).past_key_values
        for number, layer in enumerate(cache.layers):
            for kind, values in (("k", layer.keys), ("v", layer.values)):
                name = f"{names[number]}.{kind}_bmm_quantizer._amax"
                amax = values.detach().abs().max().cpu()
                found[name] = torch.maximum(found[name], amax) if name in found else amax.clone()
    return found


def run(model: Any, batch: Any, *, use_cache: bool) -> Any:
    """One pass; logits are of no interest, and those of all tokens would be the largest tensor of all."""
    settings = {"use_cache": use_cache}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        return model(batch, logits_to_keep=1, **settings)
    return model(batch, **settings)


def check_numbers(scales: dict[str, Any]) -> None:
    """A scale of zero, of infinity or of no number makes garbage of every answer."""
    import torch

    for name, tensor in scales.items():
        if not bool(torch.isfinite(tensor).all()) or not bool((tensor > 0).all()):
            raise Refused(1, f"{name} is {tensor.flatten()[:4].tolist()}: the model computes zeros, inf or nan there")


def load(job: dict[str, Any]) -> Any:
    """The model in its own type; never asks, never runs code of the folder."""
    from transformers import AutoModelForCausalLM

    try:
        model = AutoModelForCausalLM.from_pretrained(
            job["folder"], dtype="auto", local_files_only=True, trust_remote_code=False
        )
    except (ValueError, KeyError) as error:
        raise Refused(MODEL_REFUSED, f"transformers cannot load the model: {' '.join(str(error).split())}") from None
    return model.to(job["device"]).eval()


def check_device(job: dict[str, Any]) -> None:
    """Before the model is loaded."""
    import torch

    device = job["device"]
    if not device.startswith("cuda"):
        return
    if not torch.cuda.is_available():
        raise Refused(HOST_LACKS, f"quantization.calibration.device is {device}, but torch sees no CUDA GPU here")
    if torch.device(device).index is not None and torch.device(device).index >= torch.cuda.device_count():
        raise Refused(
            HOST_LACKS, f"quantization.calibration.device {device}: {torch.cuda.device_count()} GPUs are here"
        )
    free = torch.cuda.mem_get_info(torch.device(device).index or 0)[0]
    if free < job["memory"]:
        raise Refused(
            HOST_LACKS, f"{device} has {free / 1e9:.1f} GB free, calibration needs {job['memory'] / 1e9:.1f} GB"
        )


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def calibrate(job: dict[str, Any]) -> None:
    import torch

    check_device(job)
    import modelopt.torch.quantization as mtq
    from safetensors.torch import save_file

    torch.use_deterministic_algorithms(True, warn_only=True)
    remember_factors()
    batches = [torch.tensor(batch, device=job["device"]) for batch in job["batches"]]

    def run_texts(model: Any) -> None:
        with torch.inference_mode():
            for batch in batches:
                run(model, batch, use_cache=False)
                say(f"done {batch.numel()}")

    methods = methods_of(job)
    runs = sum(RUNS.get(method or "", 1) for method in methods)
    say(f"total {runs * sum(batch.numel() for batch in batches)}")
    scales: dict[str, Any] = {}
    for number, method in enumerate(methods):
        torch.manual_seed(job["seed"])
        kv_cache = job["kv_cache"] if number == 0 else "none"
        config = configuration(mtq, method, kv_cache, job["group_size"])
        try:
            model = mtq.quantize(load(job), config, run_texts)
        except AssertionError as error:
            raise Refused(1, f"ModelOpt stopped: {error}") from error
        scales |= collected(model, method, lambda module, method=method: method_of(job, module) == method)  # type: ignore[misc]
        if kv_cache != "none":
            scales |= keys_and_values(model, batches)
        del model
    check_numbers(scales)
    save_file(dict(sorted(scales.items())), job["scales"])


def main(path: str) -> int:
    job = json.loads(Path(path).read_bytes())
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not to outlive lpx, however that ends
    if os.getppid() != job["parent"]:
        return 1
    warnings.simplefilter("ignore")
    try:
        calibrate(job)
    except Refused as refused:
        if refused.__cause__ is not None:
            traceback.print_exception(refused.__cause__)
        sys.stderr.write(f"{refused}\n")
        return refused.status
    except MemoryError:
        sys.stderr.write("memory ran out\n")
        return HOST_LACKS
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
