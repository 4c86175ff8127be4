"""A first recipe for a model, written by `lpx init`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

LONGEST_DEFAULT = 2048
"""Prompt and answer in tokens that a first recipe asks for; longer contexts are the user's decision (KV memory)."""


def first_recipe(source: str, config: Mapping[str, Any], *, revision: str | None, chat: bool, schema: str) -> str:
    """YAML text of a recipe that builds `source` on the embedded backend.

    Args:
        source: what `model.source` says.
        config: the model's HF config.json.
        revision: commit to pin, where there is one.
        chat: the model has a chat template, so the smoke prompt is a message.
        schema: address of the JSON Schema for the editor line.
    """
    longest = min(int(config.get("max_position_embeddings") or LONGEST_DEFAULT), LONGEST_DEFAULT)
    prompt = (
        '    - messages: [{role: user, content: "What is the capital of France?"}]'
        if chat
        else '    - text: "The capital of France is"'
    )
    lines = [
        f"# yaml-language-server: $schema={schema}",
        f"# First recipe for {_quoted(source)} ({config.get('model_type', 'unknown family')}), written by `lpx init`.",
        f"name: {recipe_name(source)}",
        "model:",
        f"  source: {_quoted(source)}",
        *([f"  revision: {revision}"] if revision else []),
        "  dtype: auto            # the source's",
        "backend: openvino        # runs on any CPU",
        "quantization:",
        "  format: none           # or int8_wo, int4_wo",
        "parallel:",
        "  tensor: 1",
        "  pipeline: 1",
        "limits:",
        "  max_batch_size: 8",
        f"  max_input_len: {longest // 2}",
        f"  max_seq_len: {longest}     # the model's own limit: {config.get('max_position_embeddings', 'not stated')}",
        "runtime:",
        "  precision: exact       # `fast` for speed",
        "smoke:",
        "  prompts:",
        prompt,
        "      max_tokens: 32",
        "      # expect: Paris    # text that the answer must contain",
    ]
    return "\n".join(lines) + "\n"


def recipe_name(source: str) -> str:
    """`org/Some_Model.gguf` → `some_model`: letters, digits, `.`, `_`, `-`."""
    source = re.sub(r"^python-package:([^/]+)/.*", r"\1", source)
    last = re.split(r"[/\\]", source.rstrip("/\\"))[-1] or "model"
    last = re.sub(r"\.gguf$", "", last, flags=re.IGNORECASE)
    name = re.sub(r"[^a-z0-9._-]+", "-", last.lower()).strip("-._")
    return name or "model"


def _quoted(text: str) -> str:
    return text if re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._/-]*", text) else '"' + text.replace('"', '\\"') + '"'
