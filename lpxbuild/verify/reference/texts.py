"""Logits of texts, and greedy answers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

ROWS = 64
"""Positions whose logits are computed at a time."""


def body_of(model: Any) -> Any:
    """The model without its head."""
    body = model.base_model
    return body if body is not model else model.get_decoder()


def hidden_states(model: Any, sequences: list[list[int]]) -> tuple[list[Any], Any]:
    """The last hidden states of each sequence, and the class of the body's output.

    They go through the model as one batch, padded at the end, where a causal model does not see the padding: so a
    layer that is read from disk is read once.
    """
    import torch

    longest = max(map(len, sequences))
    ids = torch.zeros((len(sequences), longest), dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
    output = body_of(model)(ids, use_cache=False)
    found = output.last_hidden_state
    return [found[row, : len(sequence)] for row, sequence in enumerate(sequences)], type(output)


def logits_of(model: Any, hidden: Any, output_class: Any) -> Any:
    """What the model makes of the last hidden states [tokens, size]: its own forward, its body answering with them."""
    import torch

    body = body_of(model)
    original = body.forward

    def answer(*_arguments: Any, **_keywords: Any) -> Any:
        return output_class(last_hidden_state=hidden[None])

    body.forward = answer
    try:
        return model(torch.zeros((1, len(hidden)), dtype=torch.long), use_cache=False).logits[0]
    finally:
        body.forward = original


def write_logits(model: Any, hidden: Any, output_class: Any, path: Path) -> None:
    import numpy as np

    file = None
    open_memmap: Any = np.lib.format.open_memmap
    for begin in range(0, len(hidden), ROWS):
        block = logits_of(model, hidden[begin : begin + ROWS], output_class).numpy()
        if file is None:
            file = open_memmap(path, "w+", np.float32, (len(hidden), block.shape[1]))
        file[begin : begin + len(block)] = block
        file.flush()


def answer_of(
    model: Any, choices: list[int], prompt: list[int], given: list[int], *, length: int, ends: list[int]
) -> dict[str, Any]:
    """The model's greedy answer, read off its choices along the other's answer as far as they agree.

    Beyond the first difference only that token is known, unless `length` lets the model generate the rest.
    """
    import torch

    same = next((i for i, token in enumerate(given) if choices[i] != token), len(given))
    if given and same == len(given):
        return {"ids": given, "complete": True}
    ids = [*given[:same], choices[same]]
    cache, feed = None, [*prompt, *ids]
    while len(ids) < length and ids[-1] not in ends:
        step = model(torch.tensor([feed]), past_key_values=cache, use_cache=True)
        cache, feed = step.past_key_values, [int(step.logits[0, -1].argmax())]
        ids += feed
    return {"ids": ids, "complete": length > 0}
