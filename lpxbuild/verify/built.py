"""What was built, and what its files say about it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

PROBE_TOKENS = 96
PROBE_BYTES = 512 << 20
"""Most bytes that the points of a probe may take, for large models."""


@dataclass(frozen=True)
class VerifyInput:
    """What was built, and from what.

    Attributes:
        source: the Hugging Face folder.
        checkpoint: the folder that lpx wrote.
        engine: folder of the backend openvino's engine; None = it is compiled for the comparison.
        layout: of the checkpoint.
        max_seq_len: longest text that the engine takes.
        threads: CPU threads; None = all.
    """

    source: Path
    checkpoint: Path
    engine: Path | None
    layout: Literal["tensorrt_llm", "unified_hf"]
    max_seq_len: int
    threads: int | None = None


def formats_of(built: VerifyInput) -> tuple[list[str], Callable[[str], str], str]:
    """(formats, Hugging Face module → format, element type) of a checkpoint."""
    config = json.loads((built.checkpoint / "config.json").read_bytes())
    if built.layout == "unified_hf":
        from lpxbuild.checkpoint.unified.reader import read_unified

        reader = read_unified(built.checkpoint)
        modules = [name.removesuffix(".weight") for name in reader.weights if name.endswith(".weight")]
        found = sorted({reader.format_of(module) for module in modules} - {"none"})
        return found or ["none"], reader.format_of, str(config.get("torch_dtype") or config.get("dtype"))
    from lpxbuild.quantization.scheme import Scheme

    scheme = Scheme.from_dict(config["lpx"]["scheme"])
    return list(scheme.formats), scheme.format_of, str(config["dtype"])


def probe_tokens(config: Mapping[str, Any]) -> int:
    """Tokens of the text whose inside is looked at, for the source's config."""
    hidden = int(config.get("hidden_size") or config.get("n_embd") or 4096)
    inner = int(config.get("intermediate_size") or config.get("n_inner") or 4 * hidden)
    layers = int(config.get("num_hidden_layers") or config.get("n_layer") or 32)
    return max(16, min(PROBE_TOKENS, PROBE_BYTES // (4 * layers * (9 * hidden + 3 * inner))))


def end_ids_of(folder: Path, config: Mapping[str, Any]) -> tuple[int, ...]:
    """Tokens that end an answer."""
    path = folder / "generation_config.json"
    generation = json.loads(path.read_bytes()) if path.is_file() else {}
    found = generation.get("eos_token_id", config.get("eos_token_id"))
    return tuple(found) if isinstance(found, list) else () if found is None else (int(found),)
