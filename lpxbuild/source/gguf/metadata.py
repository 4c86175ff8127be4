"""The key-value part of a GGUF file, read with its types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lpxbuild.errors import HostError, SourceError
from lpxbuild.source.header import LFS_PREFIX

# Keys that would change the arithmetic and that a config can say only for the architectures that name them.
_UNSUPPORTED = (
    "attention.sliding_window",
    "attention.scale",
    "attention.clamp_kqv",
    "attn_logit_softcapping",
    "final_logit_softcapping",
    "logit_scale",
    "embedding_scale",
    "residual_scale",
    "expert_count",
    "expert_used_count",
    "expert_shared_count",
)
# The same for keys that mean nothing with this value.
_NEUTRAL = {
    "rope.scaling.attn_factor": 1.0,
    "rope.scaling.yarn_attn_factor": 1.0,
    "rope.scaling.yarn_ext_factor": 1.0,
    "rope.scaling.yarn_log_multiplier": 0.0,
    "expert_weights_scale": 1.0,
    "expert_gating_func": 1,
}


class Metadata:
    """Typed reading of GGUF keys; a wrong type is named with its key."""

    def __init__(self, file: Path, reader: Any) -> None:
        self.file = file
        self._fields = reader.fields

    def value(self, key: str) -> Any:
        """The value under a key as Python data, None where there is no such key."""
        field = self._fields.get(key)
        try:
            return None if field is None else field.contents()
        except ValueError:  # text that is not UTF-8 is decoded here only
            raise self._error(f"has something unreadable under {key}") from None

    def text(self, key: str) -> str | None:
        value: str | None = self._typed(key, str)
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self._typed(key, bool)
        return default if value is None else value

    def whole(self, key: str, default: int | None = None) -> int:
        value: int | None = self._typed(key, int)
        value = default if value is None else value
        if value is None:
            raise self._error(f"has no {key}")
        return value

    def size(self, key: str, default: int | None = None) -> int:
        """A count of at least 1."""
        value = self.whole(key, default)
        if value < 1:
            raise self._error(f"has {value} under {key}")
        return value

    def id(self, name: str) -> int | None:
        """A special id, `tokenizer.ggml.<name>_token_id`."""
        value: int | None = self._typed(f"tokenizer.ggml.{name}_token_id", int)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A float32 as the shortest decimal that reads back the same: 1e-05, not 9.999999747378752e-06."""
        import numpy as np

        value = self.value(key)
        if value is None and default is not None:
            return default
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            raise self._error(f"has no number under {key}")
        return float(str(np.float32(value)))

    def array(self, key: str) -> list[Any] | None:
        value: list[Any] | None = self._typed(key, list)
        return value

    @property
    def architecture(self) -> str:
        return self.text("general.architecture") or "none"

    def key(self, name: str) -> str:
        """The full key of a number of the model: `block_count` is `llama.block_count` in a llama file."""
        return f"{self.architecture}.{name}"

    def head_size(self, *, whole_rotary: bool = True) -> int:
        """Width of a head.

        Args:
            whole_rotary: RoPE has to turn all of it.
        """
        hidden, heads = self.size(self.key("embedding_length")), self.size(self.key("attention.head_count"))
        size = self.size(self.key("attention.key_length"), hidden // heads)
        rotary = self.size(self.key("rope.dimension_count"), size)
        if whole_rotary and self.value(self.key("attention.key_length")) is None:
            size = rotary  # older files state the head's width only here
        value_size = self.size(self.key("attention.value_length"), size)
        if (whole_rotary and rotary != size) or rotary > size or value_size != size:
            raise SourceError(
                f"{self.file.name} has heads of {size} with {rotary} turned by RoPE and values of {value_size}",
                why=f"in a model of the architecture {self.architecture} they are equal",
                next="give the Hugging Face folder or hub id of this model",
            )
        return size

    def check_architecture(self) -> None:
        """Refuse whatever is not one whole model of an architecture that is read, said with keys that are known."""
        from lpxbuild.source.gguf.architectures import architecture_of

        architecture = architecture_of(self)
        parts = self.whole("split.count", 1)
        if parts > 1:
            raise SourceError(
                f"{self.file.name} is one of {parts} parts of a model",
                why="lpx reads a GGUF model from one file",
                next=f"llama-gguf-split --merge {self.file} merged.gguf",
            )
        for name in _UNSUPPORTED:
            value = self.value(self.key(name))
            if value and name not in architecture.own_keys:
                raise self.refused(
                    f"sets {self.key(name)} to {value}",
                    f"the config of a {architecture.model_type} model cannot say it",
                )
        for name, neutral in _NEUTRAL.items():
            value = self.value(self.key(name))
            if value is not None and value != neutral and name not in architecture.own_keys:
                raise self.refused(
                    f"sets {self.key(name)} to {value}",
                    f"the config of a {architecture.model_type} model cannot say it",
                )

    def refused(self, problem: str, why: str) -> SourceError:
        """An error that names the file."""
        return SourceError(
            f"{self.file.name} {problem}", why=why, next="give the Hugging Face folder or hub id of this model"
        )

    def _typed(self, key: str, kind: type) -> Any:
        value = self.value(key)
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise self._error(f"has a {type(value).__name__} under {key}, expected {kind.__name__}")
        return value

    def _error(self, problem: str) -> SourceError:
        return SourceError(
            f"{self.file.name} {problem}",
            why="the file is broken or made by a tool that lpx does not know",
            next="give the Hugging Face folder or hub id of this model",
        )


def open_gguf(file: Path) -> Any:
    """A `gguf.GGUFReader` of the file (memory-mapped).

    Raises:
        HostError: the library is not installed.
        SourceError: not a GGUF file, or cut short.
    """
    with file.open("rb") as stream:
        start = stream.read(len(LFS_PREFIX))
    if start.startswith(LFS_PREFIX):
        raise SourceError(
            f"{file.name} is a Git LFS pointer, not the model",
            why="the repository was cloned without Git LFS",
            next=f"run `git lfs pull` in {file.parent}",
        )
    if start[:4] != b"GGUF":
        raise SourceError(
            f"{file.name} is not a GGUF file: it begins with {start[:4]!r}",
            why="a GGUF file begins with the four letters GGUF",
            next="download the file again",
        )
    try:
        from gguf import GGUFReader
    except ImportError:
        raise HostError(
            f"the Python package gguf is not installed, {file.name} needs it",
            why="reading GGUF is an extra of lpx",
            next="pip install 'lpxbuild[gguf]'",
        ) from None
    import numpy as np

    class Reader(GGUFReader):  # type: ignore[misc]
        """Keeps the mapped file as a plain array: slices of numpy's memmap class cost three times as much."""

        @property
        def data(self) -> Any:
            return self._mapped

        @data.setter
        def data(self, mapped: Any) -> None:
            self._mapped = np.asarray(mapped)

        def _get(self, offset: int, dtype: Any, count: int = 1, *rest: Any, **options: Any) -> Any:
            # Without this an array that claims more elements than the file has bytes is read on for ever.
            if offset >= len(self._mapped) and count > 0:
                raise IndexError(f"byte {offset} is wanted")
            return super()._get(offset, dtype, count, *rest, **options)

    try:
        return Reader(str(file))
    except (ValueError, IndexError, KeyError, OverflowError, RecursionError) as error:
        raise SourceError(
            f"{file.name} ({file.stat().st_size} bytes) is truncated or broken",
            why=f"gguf cannot read it: {error}",
            next="download the file again",
        ) from None
