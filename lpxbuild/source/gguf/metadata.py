"""The key-value part of a GGUF file: which model it is, and its config in Hugging Face's words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpxbuild.errors import HostError, SourceError
from lpxbuild.source.header import LFS_PREFIX

if TYPE_CHECKING:
    from lpxbuild.source.gguf.weights import WeightPlan

ARCHITECTURE = "llama"
# Keys that would change the arithmetic and have no counterpart in a Llama config.
_UNSUPPORTED = ("attention.sliding_window", "logit_scale", "embedding_scale", "residual_scale", "attention.scale")


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

    def check_architecture(self) -> None:
        """Refuse whatever is not one whole dense llama model."""
        architecture = self.text("general.architecture")
        if architecture != ARCHITECTURE:
            raise SourceError(
                f"{self.file.name} has the architecture {architecture}, only {ARCHITECTURE} is read from GGUF",
                why="the weights of other architectures are laid out by other rules",
                next="give the Hugging Face folder or hub id of this model",
            )
        experts = self.whole(f"{ARCHITECTURE}.expert_count", 0)
        if experts > 0:
            raise SourceError(
                f"{self.file.name} is a mixture of experts (expert_count {experts}), only dense llama models are read",
                why="experts are stacked in tensors that a Llama config has no place for",
                next="give the Hugging Face folder or hub id of this model",
            )
        parts = self.whole("split.count", 1)
        if parts > 1:
            raise SourceError(
                f"{self.file.name} is one of {parts} parts of a model",
                why="lpx reads a GGUF model from one file",
                next=f"llama-gguf-split --merge {self.file} merged.gguf",
            )
        for name in _UNSUPPORTED:
            if self.value(f"{ARCHITECTURE}.{name}"):
                value = self.value(f"{ARCHITECTURE}.{name}")
                raise self._error(f"sets {ARCHITECTURE}.{name} to {value}, which a Llama config cannot say")

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


def model_config(metadata: Metadata, plan: WeightPlan) -> dict[str, Any]:
    """config.json of the model, in the words of transformers 4."""
    hidden = metadata.size(f"{ARCHITECTURE}.embedding_length")
    heads = metadata.size(f"{ARCHITECTURE}.attention.head_count")
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": metadata.size(f"{ARCHITECTURE}.feed_forward_length"),
        "num_hidden_layers": metadata.size(f"{ARCHITECTURE}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.size(f"{ARCHITECTURE}.attention.head_count_kv", heads),
        "head_dim": head_size(metadata),
        "hidden_act": "silu",
        "max_position_embeddings": metadata.size(f"{ARCHITECTURE}.context_length"),
        "rms_norm_eps": metadata.number(f"{ARCHITECTURE}.attention.layer_norm_rms_epsilon"),
        "rope_theta": metadata.number(f"{ARCHITECTURE}.rope.freq_base", 10000.0),
        "rope_scaling": _rope_scaling(metadata, plan),
        "vocab_size": plan.vocab_size,
        "tie_word_embeddings": plan.tied,
        "attention_bias": plan.attention_bias,
        "mlp_bias": plan.mlp_bias,
        "torch_dtype": plan.dtype,
        "use_cache": True,
    }
    for key, id_ in (("bos", metadata.id("bos")), ("eos", metadata.id("eos")), ("pad", metadata.id("padding"))):
        if id_ is not None:
            config[f"{key}_token_id"] = id_
    return config


def generation_config(metadata: Metadata) -> dict[str, Any]:
    """generation_config.json: end of text and end of turn both end a generation."""
    ends = [id_ for name in ("eos", "eot", "eom") if (id_ := metadata.id(name)) is not None]
    unique = list(dict.fromkeys(ends))
    config: dict[str, Any] = {}
    if (bos := metadata.id("bos")) is not None:
        config["bos_token_id"] = bos
    if unique:
        config["eos_token_id"] = unique[0] if len(unique) == 1 else unique
    if (pad := metadata.id("padding")) is not None:
        config["pad_token_id"] = pad
    return config


def head_size(metadata: Metadata) -> int:
    """Width of a head; RoPE has to turn all of it."""
    hidden = metadata.size(f"{ARCHITECTURE}.embedding_length")
    heads = metadata.size(f"{ARCHITECTURE}.attention.head_count")
    size = metadata.size(f"{ARCHITECTURE}.attention.key_length", hidden // heads)
    rotary = metadata.size(f"{ARCHITECTURE}.rope.dimension_count", size)
    if metadata.value(f"{ARCHITECTURE}.attention.key_length") is None:
        size = rotary  # older files state the head's width only here
    value_size = metadata.size(f"{ARCHITECTURE}.attention.value_length", size)
    if rotary != size or value_size != size:
        raise SourceError(
            f"{metadata.file.name} has heads of {size} with {rotary} turned by RoPE and values of {value_size}",
            why="in a Llama model the three are equal",
            next="give the Hugging Face folder or hub id of this model",
        )
    return size


def _rope_scaling(metadata: Metadata, plan: WeightPlan) -> dict[str, Any] | None:
    kind = metadata.text(f"{ARCHITECTURE}.rope.scaling.type") or "none"
    old_linear = metadata.number(f"{ARCHITECTURE}.rope.scale_linear", 1.0)
    if kind == "none" and old_linear != 1.0:
        return {"rope_type": "linear", "factor": old_linear}
    if plan.rope_factors is not None:
        from lpxbuild.source.gguf.rope import llama3_scaling

        return llama3_scaling(metadata, plan.rope_factors)
    if kind == "none":
        return None
    factor = metadata.number(f"{ARCHITECTURE}.rope.scaling.factor")
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = metadata.size(f"{ARCHITECTURE}.rope.scaling.original_context_length")
        return {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    raise SourceError(
        f"{metadata.file.name} has the rope scaling {kind!r}",
        why="lpx reads none, linear, yarn and Llama 3's factors from GGUF",
        next="give the Hugging Face folder or hub id of this model",
    )
