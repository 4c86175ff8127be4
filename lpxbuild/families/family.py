"""A family of models: how its HF config is read, which tensors it has, which TensorRT-LLM fields it gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lpxbuild.errors import SourceError
from lpxbuild.families.reading import flag, positive_float, positive_int, source_dtype
from lpxbuild.families.rope import read_rope
from lpxbuild.families.rules import DECODER
from lpxbuild.families.shape import ModelShape, TensorSpec
from lpxbuild.families.weights import WeightRule

Window = tuple["int | None", "tuple[str, ...] | None"]
_ACTIVATIONS = {"silu": "silu", "swish": "silu"}


def no_window(_config: Mapping[str, Any], _layers: int) -> Window:
    """Every layer sees the whole context."""
    return None, None


def no_fields(_shape: ModelShape) -> dict[str, Any]:
    """Nothing beyond the fields that every family has."""
    return {}


@dataclass(frozen=True)
class Family:
    """One entry of the registry; a file of this package declares it as `FAMILY`.

    Args:
        name: HF's `model_type`.
        architectures: HF architectures of this family; TensorRT-LLM knows them under the same names.
        defaults: what transformers takes where config.json is silent.
        qkv_bias, dense_bias, mlp_bias: always, never, or the config key that says it.
        unrepresentable: config keys that TensorRT-LLM's class of this family has no place for when true.
        window: reads the sliding window: (size or None, type of each layer or None).
        trtllm_fields: what TensorRT-LLM's config class of this family reads beside the shared fields.
    """

    name: str
    architectures: tuple[str, ...]
    defaults: Mapping[str, Any]
    qkv_bias: bool | str = False
    dense_bias: bool | str = False
    mlp_bias: bool | str = False
    qk_norm: bool = False
    unrepresentable: tuple[str, ...] = ()
    window: Callable[[Mapping[str, Any], int], Window] = no_window
    trtllm_fields: Callable[[ModelShape], dict[str, Any]] = no_fields
    weights: tuple[WeightRule, ...] = field(default=DECODER, repr=False)

    def model_shape(self, hf_config: Mapping[str, Any], *, stored_dtype: str | None = None) -> ModelShape:
        """Check and normalise a HF config.

        Args:
            hf_config: config.json as read.
            stored_dtype: dtype of the tensors in the files, used where the config names none.

        Raises:
            SourceError: a value is missing, not a number, or not supported.
        """
        for key in self.unrepresentable:
            if flag(hf_config, key, False):
                raise SourceError(
                    f"config.json: {key} is true",
                    why=f"TensorRT-LLM's class for {self.name} has no such tensors",
                    next="use a model of this family without it",
                )
        hidden = positive_int(hf_config, "hidden_size")
        heads = positive_int(hf_config, "num_attention_heads")
        layers = positive_int(hf_config, "num_hidden_layers")
        positions = positive_int(hf_config, "max_position_embeddings", self.defaults["max_position_embeddings"])
        base, scaling = read_rope(
            hf_config, default_theta=self.defaults["rope_theta"], max_position_embeddings=positions
        )
        window, layer_types = self.window({**self.defaults, **hf_config}, layers)
        return ModelShape(
            family=self.name,
            architecture=architecture_of(hf_config) or self.architectures[0],
            hidden_size=hidden,
            intermediate_size=positive_int(hf_config, "intermediate_size"),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=_key_value_heads(hf_config, heads),
            head_size=_head_size(hf_config, hidden, heads, self.defaults.get("head_dim")),
            vocab_size=positive_int(hf_config, "vocab_size"),
            max_position_embeddings=positions,
            norm_epsilon=positive_float(hf_config, "rms_norm_eps", self.defaults["rms_norm_eps"]),
            hidden_act=_activation(hf_config),
            rotary_base=base,
            rotary_scaling=scaling,
            tie_word_embeddings=flag(hf_config, "tie_word_embeddings", False),
            dtype=source_dtype(hf_config, stored_dtype),
            qkv_bias=_bias(hf_config, self.qkv_bias),
            dense_bias=_bias(hf_config, self.dense_bias),
            mlp_bias=_bias(hf_config, self.mlp_bias),
            qk_norm=self.qk_norm,
            sliding_window=window,
            layer_types=layer_types,
        )

    def rules(self, shape: ModelShape) -> tuple[WeightRule, ...]:
        """The weight rules that hold for this model."""
        return tuple(rule for rule in self.weights if rule.holds(shape))

    def tensors(self, shape: ModelShape) -> dict[str, TensorSpec]:
        """HF tensor names → expected shape; a tied head may be in the files or not."""
        expected: dict[str, TensorSpec] = {}
        for rule in self.rules(shape):
            optional = rule.tied is not None and shape.tie_word_embeddings
            for layer in range(shape.num_hidden_layers) if rule.place == "layer" else (None,):
                if layer is None or rule.in_layer(shape, layer):
                    for name, size in rule.sources(shape, layer):
                        expected[name] = TensorSpec(size, required=not optional)
        return expected


def architecture_of(hf_config: Mapping[str, Any]) -> str | None:
    """`architectures[0]`, or None where the config has none."""
    architectures = hf_config.get("architectures")
    if isinstance(architectures, list) and architectures:
        return str(architectures[0])
    return None


def _key_value_heads(config: Mapping[str, Any], heads: int) -> int:
    # Configs older than grouped attention have no key: one KV head for each query head.
    count = positive_int(config, "num_key_value_heads", heads)
    if heads % count:
        raise SourceError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {count}",
            why="each KV head serves the same number of query heads",
            next="compare config.json with the original repository of the model",
        )
    return count


def _head_size(config: Mapping[str, Any], hidden: int, heads: int, default: int | None) -> int:
    if config.get("head_dim") is None and default is None and hidden % heads:
        raise SourceError(
            f"config.json: hidden_size {hidden} is not a multiple of num_attention_heads {heads}, "
            "and head_dim is not given",
            why="the size of a head is hidden_size / num_attention_heads unless head_dim says otherwise",
            next="compare config.json with the original repository of the model",
        )
    size = positive_int(config, "head_dim", default or hidden // heads)
    if size % 2:
        raise SourceError(
            f"config.json: the size of a head is {size}",
            why="RoPE turns pairs of dimensions, so it must be even",
            next="compare config.json with the original repository of the model",
        )
    return size


def _activation(config: Mapping[str, Any]) -> str:
    name = config.get("hidden_act") or "silu"
    if not isinstance(name, str) or name not in _ACTIVATIONS:
        raise SourceError(
            f"config.json: hidden_act is {name!r}",
            why="models of this family use silu",
            next="compare config.json with the original repository of the model",
        )
    return _ACTIVATIONS[name]


def _bias(config: Mapping[str, Any], rule: bool | str) -> bool:
    return flag(config, rule, False) if isinstance(rule, str) else rule
