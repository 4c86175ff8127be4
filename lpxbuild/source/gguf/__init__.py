"""A Hugging Face folder made of a GGUF file.

GGUF: github.com/ggml-org/ggml/blob/master/docs/gguf.md. What the file says is kept to the bit: dequantized values are
those of the `gguf` library, numbers of the config are the shortest that read back as the file's float32.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from lpxbuild.errors import HostError, SourceError
from lpxbuild.output import Output
from lpxbuild.source.folder import CONFIG, GENERATION_CONFIG, TOKENIZER, WEIGHTS
from lpxbuild.source.gguf.config import generation_config, model_config
from lpxbuild.source.gguf.metadata import Metadata, open_gguf
from lpxbuild.source.gguf.weights import plan_weights, write_weights

__all__ = ["convert_gguf"]


def convert_gguf(file: Path, destination: Path, *, dtype: str = "auto", output: Output) -> Path:
    """Write config, weights, tokenizer and chat template into `destination` and return it.

    config.json comes last: a folder that was left half-made is not taken for a model.

    Args:
        file: the `.gguf`; only one tensor block of it is in memory at a time.
        destination: a folder that is empty or does not exist.
        dtype: `auto` keeps float32, float16 and bfloat16 files as they are and makes bfloat16 of quantized ones
            (rounded to nearest even); a name makes that dtype of any file. Quantized values are exact in `float32`.

    Raises:
        SourceError: not GGUF, another architecture, a tensor or tokenizer of an unknown kind.
        HostError: the `gguf` library is missing, no disk space.
    """
    if destination.exists() and any(destination.iterdir()):
        raise SourceError(f"{destination} is not empty", next="give an empty folder for the converted model")
    reader = open_gguf(file)
    metadata = Metadata(file, reader)
    metadata.check_architecture()
    plan = plan_weights(metadata, reader.tensors, dtype)
    config = model_config(metadata, plan)
    _check_space(destination, plan.nbytes)

    from lpxbuild.source.gguf.vocabulary import build_tokenizer

    tokenizer = build_tokenizer(metadata, vocab_size=config["vocab_size"])
    output.step(f"source: {file.name} ({', '.join(plan.types)}) to a Hugging Face folder in {plan.dtype}")
    destination.mkdir(parents=True, exist_ok=True)
    write_weights(destination / WEIGHTS, plan, output=output)
    tokenizer.model.save(str(destination / TOKENIZER))
    _write_json(destination / "tokenizer_config.json", tokenizer.config)
    _write_json(destination / "special_tokens_map.json", tokenizer.special_tokens)
    template = metadata.text("tokenizer.chat_template")
    if template:
        (destination / "chat_template.jinja").write_text(template, encoding="utf-8")
    _write_json(destination / GENERATION_CONFIG, generation_config(metadata))
    _write_json(destination / CONFIG, config)
    return destination


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _check_space(destination: Path, wanted: int) -> None:
    existing = next(folder for folder in (destination.absolute(), *destination.absolute().parents) if folder.exists())
    free = shutil.disk_usage(existing).free
    if free < wanted + (64 << 20):
        raise HostError(
            f"not enough disk space for the converted model: {wanted / 1e9:.2f} GB needed, {free / 1e9:.2f} GB free",
            why=f"the folder is {destination}",
            next="free some space, or set LPX_CACHE to a folder on a larger disk",
        )
