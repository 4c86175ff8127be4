"""Run by the reference interpreter: what transformers' own GGUF loader makes of a file.

usage: gguf_reference.py LINES.json FILE.gguf OUT.json [FILE.gguf OUT.json]...
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import sys
from pathlib import Path

import gguf
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, modeling_gguf_pytorch_utils


def parse_once() -> None:
    """The loader parses a file five times, some seconds each; give the same answers from one parse."""
    gguf.GGUFReader = functools.cache(gguf.GGUFReader)
    load = modeling_gguf_pytorch_utils.load_gguf_checkpoint
    metadata = functools.cache(load)

    def remembered(path, return_tensors=False, model_to_load=None):
        if return_tensors:
            return load(path, return_tensors=True, model_to_load=model_to_load)
        return copy.deepcopy(metadata(path))

    for module in list(sys.modules.values()):
        if getattr(module, "load_gguf_checkpoint", None) is load:
            module.load_gguf_checkpoint = remembered


def describe(file: Path, lines: list[str]) -> dict:
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    ids = [tokenizer.encode(line, add_special_tokens=False) for line in lines]
    config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    loaded = modeling_gguf_pytorch_utils.load_gguf_checkpoint(str(file), return_tensors=True, model_to_load=model)
    sums = {}
    for name, tensor in loaded["tensors"].items():
        for dtype in ("float32", "float16", "bfloat16"):
            bits = tensor.to(getattr(torch, dtype)).contiguous().view(torch.uint8).numpy()
            sums[f"{name} {dtype}"] = hashlib.sha256(bits.tobytes()).hexdigest()
    return {"ids": ids, "config": config.to_dict(), "sha256": sums}


def main() -> None:
    lines = json.loads(Path(sys.argv[1]).read_text())
    parse_once()
    for file, out in zip(sys.argv[2::2], sys.argv[3::2]):
        Path(out).write_text(json.dumps(describe(Path(file), lines), default=str))


main()
