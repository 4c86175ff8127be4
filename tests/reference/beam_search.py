"""Run by the reference interpreter: the beam search of transformers in float32, end ids switched off.

usage: beam_search.py MODEL PROMPT.json OUT.json BEAMS TOKENS   PROMPT.json: [ids]. OUT: {"beams": [[TOKENS ids], ...]
best first, "log_probs": [sum of each beam's log-probabilities]}.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM


def main(model_path: str, prompt_path: Path, out: Path, beams: int, tokens: int) -> None:
    torch.set_num_threads(2)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    ids = torch.tensor([json.loads(prompt_path.read_text())])
    with torch.inference_mode():
        answer = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            num_beams=beams,
            num_return_sequences=beams,
            do_sample=False,
            early_stopping=True,
            eos_token_id=None,
            pad_token_id=0,
        )
        scores = torch.log_softmax(model(answer).logits[:, ids.shape[1] - 1 : -1], dim=-1)
        made = answer[:, ids.shape[1] :]
        totals = scores.gather(2, made[:, :, None]).sum(dim=(1, 2))
    out.write_text(json.dumps({"beams": made.tolist(), "log_probs": totals.tolist()}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
