"""Run by the reference interpreter: tiny models of images and text; the docs' script then saves their text parts.

usage: text_part_reference.py FOLDER SCRIPT TOKENIZER   → FOLDER/<name>/{whole,text}, and logits.npz of the whole's text
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import (
    AutoModelForImageTextToText,
    Gemma3Config,
    Gemma3TextConfig,
    LlamaConfig,
    LlavaConfig,
    Mistral3Config,
    MistralConfig,
    PixtralVisionConfig,
    SiglipVisionConfig,
)

SIZES = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
}
EYES = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28}
MODELS = {
    "gemma3": lambda: Gemma3Config(
        text_config=Gemma3TextConfig(**SIZES), vision_config=SiglipVisionConfig(patch_size=14, **EYES)
    ),
    "mistral3": lambda: Mistral3Config(
        text_config=MistralConfig(**SIZES), vision_config=PixtralVisionConfig(patch_size=14, **EYES)
    ),
    "llava": lambda: LlavaConfig(
        text_config=LlamaConfig(**SIZES), vision_config=SiglipVisionConfig(patch_size=14, **EYES)
    ),
}

folder, script, tokenizer = map(Path, sys.argv[1:])
for name, make in MODELS.items():
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(make(), dtype=torch.float32).eval()
    whole = folder / name / "whole"
    model.save_pretrained(whole)
    for file in tokenizer.glob("tokenizer*.json"):
        shutil.copy(file, whole)
    ids = torch.randint(3, 300, (1, 12))
    with torch.no_grad():
        np.savez(folder / name / "logits.npz", ids=ids[0].numpy(), logits=model(input_ids=ids).logits[0].numpy())
    subprocess.run([sys.executable, script, whole, folder / name / "text"], check=True)
