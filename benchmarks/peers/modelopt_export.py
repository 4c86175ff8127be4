"""The peer of benchmarks/conversion.py: NVIDIA ModelOpt doing the same job, run by an interpreter that has it.

    python benchmarks/peers/modelopt_export.py MODEL OUT FORMAT   FORMAT: none fp8_pc_pt int4_rtn w4a16_nvfp4 fp8 nvfp4

Prints one JSON line: seconds of import, load, quantize and export. Formats with scales of the input are calibrated on
one sequence of 16 tokens, which is less than anybody would take.
"""

from __future__ import annotations

import copy
import json
import sys
import time
from itertools import pairwise

CONFIGS = {
    "fp8_pc_pt": "FP8_PER_CHANNEL_PER_TOKEN_CFG",
    "int4_rtn": "INT4_BLOCKWISE_WEIGHT_ONLY_CFG",
    "w4a16_nvfp4": "W4A16_NVFP4_CFG",
    "fp8": "FP8_DEFAULT_CFG",
    "nvfp4": "NVFP4_DEFAULT_CFG",
}


def main() -> None:
    model_folder, out, name = sys.argv[1:]
    clock = [time.perf_counter()]
    import modelopt.torch.quantization as mtq
    import torch
    from modelopt.torch.export import export_tensorrt_llm_checkpoint
    from transformers import AutoModelForCausalLM

    clock.append(time.perf_counter())
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype="auto").eval()
    clock.append(time.perf_counter())
    if name != "none":
        ids = torch.arange(16).reshape(1, 16)
        model = mtq.quantize(model, copy.deepcopy(getattr(mtq, CONFIGS[name])), lambda each: each(ids))
    clock.append(time.perf_counter())
    with torch.inference_mode():
        export_tensorrt_llm_checkpoint(model, "llama", torch.bfloat16, export_dir=out, inference_tensor_parallel=2)
    clock.append(time.perf_counter())
    steps = [after - before for before, after in pairwise(clock)]
    print(json.dumps(dict(zip(("import", "load", "quantize", "export"), steps))))


if __name__ == "__main__":
    main()
