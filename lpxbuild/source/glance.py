"""A model's config without its weights, for `lpx init`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lpxbuild.source.folder import CONFIG, read_config
from lpxbuild.source.quantized import settings_of

_TEMPLATE_FILES = ("chat_template.jinja", "tokenizer_config.json")


@dataclass(frozen=True)
class Glance:
    """Attributes: the HF config; the commit of a hub repository; whether there is a chat template."""

    config: dict[str, Any]
    commit: str | None
    chat: bool


def glance(location: str, revision: str | None, *, hub: bool) -> Glance:
    """Read what a first recipe needs.

    Args:
        location: hub id, folder, or `.gguf` file.
        revision: branch, tag or commit of a hub repository.
        hub: `location` is a hub id.

    Raises:
        SourceError, HostError: as `fetch`.
    """
    if hub:
        from lpxbuild.source.hub import fetch_small

        folder, commit = fetch_small(location, revision, (CONFIG, *_TEMPLATE_FILES))
        return Glance(_readable(folder), commit, _has_template(folder))
    path = Path(location)
    if path.is_file():
        from lpxbuild.source.gguf.config import model_config
        from lpxbuild.source.gguf.metadata import Metadata, open_gguf
        from lpxbuild.source.gguf.weights import plan_weights

        reader = open_gguf(path)
        metadata = Metadata(path, reader)
        metadata.check_architecture()
        config = model_config(metadata, plan_weights(metadata, reader.tensors, "auto"))
        return Glance(config, None, bool(metadata.text("tokenizer.chat_template")))
    return Glance(_readable(path), None, _has_template(path))


def _readable(folder: Path) -> dict[str, Any]:
    """The config, where lpx reads this kind of weights."""
    config = read_config(folder)
    settings_of(folder, config)
    return config


def _has_template(folder: Path) -> bool:
    if (folder / _TEMPLATE_FILES[0]).is_file():
        return True
    config = folder / _TEMPLATE_FILES[1]
    return config.is_file() and '"chat_template"' in config.read_text(encoding="utf-8", errors="replace")
