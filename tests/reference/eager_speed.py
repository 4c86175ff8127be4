"""Run by the reference interpreter: transformers eager in float32, kept alive, timed on request.

usage: eager_speed.py MODEL THREADS   Each line of stdin is {"prompts": [[ids]...], "tokens": n}; the answer is
{"seconds": s, "ids": [[...]...]}: greedy, exactly n new tokens per prompt, all prompts of equal length in one batch.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers import AutoModelForCausalLM


def main(model_path: str, threads: int) -> None:
    torch.set_num_threads(threads)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32, attn_implementation="eager").eval()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        ids = torch.tensor(job["prompts"])
        started = time.perf_counter()
        with torch.inference_mode():
            answer = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=job["tokens"],
                do_sample=False,
                eos_token_id=None,
                pad_token_id=0,
            )
        seconds = time.perf_counter() - started
        print(json.dumps({"seconds": seconds, "ids": answer[:, ids.shape[1] :].tolist()}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
