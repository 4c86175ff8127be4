"""Run by the reference interpreter: what transformers computes in float32 of several Hugging Face folders.

usage: folder_logits.py FOLDER …   → FOLDER/logits.npy [80, vocabulary]
Prints the quant_methods that transformers loads.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.quantizers.auto import AUTO_QUANTIZER_MAPPING


def main(folders: list[Path]) -> None:
    torch.set_num_threads(1)
    print(*AUTO_QUANTIZER_MAPPING)
    for folder in folders:
        model, loading = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        assert not loading["unexpected_keys"], loading["unexpected_keys"]
        assert set(loading["missing_keys"]) <= {"lm_head.weight"}, loading["missing_keys"]
        ids = torch.arange(80)[None] * 7 % (model.config.vocab_size - 3) + 3
        with torch.inference_mode():
            np.save(folder / "logits.npy", model.eval()(ids).logits[0].numpy())


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]])
