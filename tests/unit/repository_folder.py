"""What the repository tests share: an engine folder without an engine, and a reader that is not lpx's."""

from __future__ import annotations

import json
from pathlib import Path

LIMITS = {"max_batch_size": 8, "max_input_len": 64, "max_seq_len": 128, "max_beam_width": 4, "max_num_tokens": 64}


def make_engine(folder: Path, *, weight_bytes: int = 3 << 20) -> Path:
    """An engine folder as far as the repository looks into it."""
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "engine.json").write_text(json.dumps({"format_version": 1, "backend": "openvino", "limits": LIMITS}))
    (folder / "config.json").write_text("{}")
    (folder / "openvino_model.xml").write_text("<net/>")
    (folder / "openvino_model.bin").write_bytes(b"\x07" * weight_bytes)
    # "${" is an ordinary token of real vocabularies, no template field.
    (folder / "tokenizer" / "tokenizer.json").write_text('{"model": {"vocab": {"${": 0}}}')
    (folder / "tokenizer" / "tokenizer_config.json").write_text("{}")
    return folder


def configuration(repository: Path, model: str):
    """config.pbtxt read with Triton's schema, not with lpx."""
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    return text_format.Parse((repository / model / "config.pbtxt").read_text(), model_config_pb2.ModelConfig())
