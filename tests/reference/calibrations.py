"""Run by the reference interpreter: ModelOpt's calibration as its own examples call it, and keys and values by hand.

usage: calibrations.py JOBS.json. Each job: {folder, batches, preset, group_size, kv_bits, out}; out gets the buffers of
every quantizer, and the weight behind the factors as <module>.smoothed_weight. With preset null out gets the largest
key and value of each layer as transformers keeps them in its cache: <layer>.k, <layer>.v.
"""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM


def cached(model: torch.nn.Module, batches: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    largest: dict[str, torch.Tensor] = {}
    for batch in batches:
        with torch.inference_mode():
            cache = model(batch, use_cache=True).past_key_values
        for number, layer in enumerate(cache.layers):
            for kind, values in (("k", layer.keys), ("v", layer.values)):
                amax = values.abs().max().float()
                name = f"{number}.{kind}"
                largest[name] = torch.maximum(largest[name], amax) if name in largest else amax
    return largest


def calibrated(model: torch.nn.Module, batches: list[torch.Tensor], job: dict) -> dict[str, torch.Tensor]:
    config = copy.deepcopy(getattr(mtq, job["preset"]))
    for entry in config["quant_cfg"]:
        for cfg in entry.get("cfg") if isinstance(entry.get("cfg"), list) else [entry.get("cfg")]:
            if "weight_quantizer" in entry["quantizer_name"] and cfg and cfg["num_bits"] == 4 and cfg["block_sizes"]:
                cfg["block_sizes"][-1] = job["group_size"]
    if job["kv_bits"] is not None:
        bits = job["kv_bits"] if isinstance(job["kv_bits"], int) else tuple(job["kv_bits"])
        config["quant_cfg"].append({"quantizer_name": "*[kv]_bmm_quantizer", "cfg": {"num_bits": bits, "axis": None}})

    def forward_loop(model: torch.nn.Module) -> None:
        for batch in batches:
            model(batch)

    model = mtq.quantize(model, config, forward_loop)
    found = {name: buffer.contiguous().clone() for name, buffer in model.named_buffers() if "_quantizer." in name}
    for name, layer in model.named_modules():
        if getattr(getattr(layer, "input_quantizer", None), "_pre_quant_scale", None) is not None:
            found[f"{name}.smoothed_weight"] = layer.weight.detach().contiguous().clone()
    return found


def main(path: str) -> None:
    for job in json.loads(Path(path).read_text()):
        model = AutoModelForCausalLM.from_pretrained(job["folder"], dtype="auto").eval()
        batches = [torch.tensor(batch) for batch in job["batches"]]
        found = cached(model, batches) if job["preset"] is None else calibrated(model, batches, job)
        save_file(found, job["out"])


if __name__ == "__main__":
    main(sys.argv[1])
