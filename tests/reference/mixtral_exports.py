"""Run by the reference interpreter: what ModelOpt's export_tensorrt_llm_checkpoint writes for the tiny Mixtral.

usage: mixtral_exports.py OUT.json → {"<format>-<ranks>": [{tensor: "DTYPE shape sha256"} of each rank]}

Weights, formats and calibration are those of unified_exports.py, whose record holds what the calibration found.
"""

from __future__ import annotations

import copy
import json
import sys
import tempfile
import warnings
from pathlib import Path

import modelopt.torch.quantization as mtq
import torch
from modelopt.torch.export import export_tensorrt_llm_checkpoint, get_model_type

sys.path.insert(0, str(Path(__file__).parent))
from unified_exports import calibration, configured, digests, made

EXPORTS = ("none", "fp8", "fp8-kv", "int4_awq-g64", "nvfp4")


def main(out: Path) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, str]]] = {}
    for export in EXPORTS:
        model = made("mixtral")
        if export != "none":
            model = mtq.quantize(model, configured(export), calibration)
        for ranks in (1, 2):
            with tempfile.TemporaryDirectory() as place, torch.inference_mode():
                export_tensorrt_llm_checkpoint(
                    copy.deepcopy(model),
                    get_model_type(model),
                    torch.bfloat16,
                    export_dir=place,
                    inference_tensor_parallel=ranks,
                )
                found[f"{export}-{ranks}"] = []
                for file in sorted(Path(place).glob("rank*.safetensors")):
                    alone = Path(place) / file.stem
                    alone.mkdir()
                    file.rename(alone / file.name)
                    found[f"{export}-{ranks}"].append(digests(alone))
    out.write_text(json.dumps(found, indent=0) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
