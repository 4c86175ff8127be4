"""Run by the reference interpreter: what transformers computes of a Hugging Face folder in float32.

usage: greedy_logits.py MODEL PROMPT.json OUT.npz   PROMPT.json: [ids]. OUT: logits [prompt, vocabulary], greedy [32],
log_probs [32] (of the greedy tokens).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM


def main(model_path: str, prompt_path: Path, out: str) -> None:
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    ids = torch.tensor([json.loads(prompt_path.read_text())])
    with torch.inference_mode():
        logits = model(ids).logits[0]
        answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=32,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        greedy = answer[0, ids.shape[1] :]
        scores = torch.log_softmax(model(answer).logits[0, ids.shape[1] - 1 : -1], dim=-1)
        log_probs = scores.gather(1, greedy[:, None])[:, 0]
    np.savez(out, logits=logits.numpy(), greedy=greedy.numpy(), log_probs=log_probs.numpy())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), sys.argv[3])
