"""A family of models: how its HF config is read, which tensors it has, which TensorRT-LLM fields it gets."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lpxbuild.errors import SourceError
from lpxbuild.families.reading import flag, positive_float, positive_int, source_dtype
from lpxbuild.families.rope import read_rope
from lpxbuild.families.rules import DECODER
from lpxbuild.families.shape import ModelShape, TensorSpec
from lpxbuild.families.weights import WeightRule
from lpxbuild.families.window import Window

Config = Mapping[str, Any]
Rope = tuple[float, "dict[str, Any] | None"]

SILU = {"silu": "silu", "swish": "silu"}
GELU = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
}
_COMPARE = "compare config.json with the original repository of the model"


def no_window(_config: Config, _layers: int) -> Window:
    """Every layer sees the whole context."""
    return None, None


def no_fields(_shape: ModelShape) -> dict[str, Any]:
    """Nothing beyond the fields that every family has."""
    return {}


def nothing_further(_config: Config, _shape: ModelShape) -> dict[str, Any]:
    """Nothing beyond what is read for every family."""
    return {}


def nothing_amiss(_shape: ModelShape) -> None:
    """TensorRT-LLM's class can express every model of the family."""
    return None


@dataclass(frozen=True)
class Family:
    """One entry of the registry; a file of this package declares it as `FAMILY`.

    Attributes:
        name: HF's `model_type`.
        architectures: HF architectures of this family; TensorRT-LLM knows them under the same names.
        attention: features that a model of the family may need (`attention_features`), for the table of families.
        checked_against: what the tests compare it with, for the table of families.
        defaults: what transformers takes where config.json is silent, by the keys of config.json.
        keys: our name of a size → the family's key of it, where it is another ("hidden_size": "n_embd").
        activations: HF's names → ModelShape.hidden_act; the first is the family's usual one.
        activation_key, norm_key: the keys of the activation and of the norms' epsilon.
        norm, mlp, position, qk_norm, sandwich_norms: of every model of the family, as in ModelShape.
        qkv_bias, dense_bias, mlp_bias: always, never, or the config key that says it.
        unrepresentable: config keys that TensorRT-LLM's class of this family has no place for when true.
        window: reads the sliding window: (size or None, type of each layer or None).
        rope: reads base and scaling: (config, default base, max_position_embeddings).
        further: reads what only this family has, as fields of ModelShape.
        trtllm_fields: what TensorRT-LLM's config class of this family reads beside the shared fields.
        rebuild: the way back, from a checkpoint's config.json to fields of ModelShape.
        weights: the rules of its tensors.
        ignored: ends of the names of buffers in the files that hold nothing learned.
        prefix: begins the names of transformers' tensors, and is missing from files on the hub.
        pipeline: whether TensorRT-LLM's class can be cut into pipeline stages.
        copies_kv_heads: whether KV heads may be copied where there are more ranks.
        whole: fields of ModelShape that must be multiples of the ranks, beside heads and MLP (no padding there).
        misfit: what TensorRT-LLM's class cannot express of this model: (what, why), None where it can everything.
        remote_code: transformers has no class for it, so that its loaders run the code that comes with the model.
    """

    name: str
    architectures: tuple[str, ...]
    defaults: Config
    attention: tuple[str, ...] = ()
    checked_against: str = "transformers' logits"
    keys: Mapping[str, str] = field(default_factory=dict)
    activations: Mapping[str, str] = field(default_factory=lambda: SILU)
    activation_key: str = "hidden_act"
    norm_key: str = "rms_norm_eps"
    norm: str = "rms"
    mlp: str = "gated"
    position: str = "rope"
    qk_norm: bool = False
    sandwich_norms: bool = False
    qkv_bias: bool | str = False
    dense_bias: bool | str = False
    mlp_bias: bool | str = False
    unrepresentable: tuple[str, ...] = ()
    window: Callable[[Config, int], Window] = no_window
    rope: Callable[[Config, float, int], Rope] = read_rope
    further: Callable[[Config, ModelShape], dict[str, Any]] = nothing_further
    trtllm_fields: Callable[[ModelShape], dict[str, Any]] = no_fields
    rebuild: Callable[[Config, ModelShape], dict[str, Any]] = nothing_further
    weights: tuple[WeightRule, ...] = field(default=DECODER, repr=False)
    ignored: tuple[str, ...] = ()
    prefix: str = ""
    pipeline: bool = True
    copies_kv_heads: bool = True
    whole: tuple[str, ...] = ()
    misfit: Callable[[ModelShape], tuple[str, str] | None] = nothing_amiss
    remote_code: bool = False

    def model_shape(self, hf_config: Config, *, stored_dtype: str | None = None) -> ModelShape:
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
                    why=f"TensorRT-LLM's class for {self.name} has no place for it",
                    next="use a model of this family without it",
                )

        def count(name: str) -> int:
            key = self.keys.get(name, name)
            return positive_int(hf_config, key, self.defaults.get(key))

        hidden, heads, layers = count("hidden_size"), count("num_attention_heads"), count("num_hidden_layers")
        positions = count("max_position_embeddings")
        base, scaling = self.rope(hf_config, self.defaults.get("rope_theta", 10000.0), positions)
        window, layer_types = self.window({**self.defaults, **hf_config}, layers)
        shape = self.plain(
            architecture=architecture_of(hf_config) or self.architectures[0],
            hidden_size=hidden,
            intermediate_size=self._intermediate_size(hf_config, hidden),
            num_hidden_layers=layers,
            num_attention_heads=heads,
            num_key_value_heads=_key_value_heads(hf_config, self.keys, self.defaults, heads),
            head_size=_head_size(hf_config, self.keys, hidden, heads, self.defaults.get("head_dim")),
            vocab_size=count("vocab_size"),
            max_position_embeddings=positions,
            norm_epsilon=positive_float(hf_config, self.norm_key, self.defaults[self.norm_key]),
            hidden_act=self._activation(hf_config),
            rotary_base=base,
            rotary_scaling=scaling,
            tie_word_embeddings=flag(hf_config, "tie_word_embeddings", self.defaults.get("tie_word_embeddings", False)),
            dtype=source_dtype(hf_config, stored_dtype),
            qkv_bias=_bias(hf_config, self.defaults, self.qkv_bias),
            dense_bias=_bias(hf_config, self.defaults, self.dense_bias),
            mlp_bias=_bias(hf_config, self.defaults, self.mlp_bias),
            sliding_window=window,
            layer_types=layer_types,
        )
        return replace(shape, **self.further({**self.defaults, **hf_config}, shape))

    def plain(self, **fields: Any) -> ModelShape:
        """A ModelShape with what all models of the family have in common."""
        return ModelShape(
            family=self.name,
            **{
                "norm": self.norm,
                "mlp": self.mlp,
                "position": self.position,
                "qk_norm": self.qk_norm,
                "sandwich_norms": self.sandwich_norms,
                **fields,
            },
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

    @property
    def embedding(self) -> str:
        """HF name of the vocabulary's table."""
        return self._source("transformer.vocab_embedding.weight")

    @property
    def head(self) -> str:
        """HF name of the output projection."""
        return self._source("lm_head.weight")

    @property
    def has_experts(self) -> bool:
        """Whether layers of this family are mixtures of experts."""
        return any(rule.experts for rule in self.weights)

    @property
    def layer_prefix(self) -> str:
        """What HF names of tensors in layers begin with, up to the number."""
        return next(rule.parts[0].source for rule in self.weights if rule.place == "layer").split("{layer}")[0]

    @property
    def roots(self) -> tuple[str, ...]:
        """First words of the HF names of all tensors."""
        names = (part.source for rule in self.weights for part in rule.parts)
        return tuple(dict.fromkeys(name.split(".")[0] + "." for name in names))

    def _source(self, target: str) -> str:
        return next(rule.parts[0].source for rule in self.weights if rule.target == target)

    def _intermediate_size(self, config: Config, hidden: int) -> int:
        key = self.keys.get("intermediate_size", "intermediate_size")
        # GPT-2 and Falcon: four times the hidden size where the key is null or absent.
        return positive_int(config, key, self.defaults.get(key, None if key == "intermediate_size" else 4 * hidden))

    def _activation(self, config: Config) -> str:
        usual = next(iter(self.activations))
        name = config.get(self.activation_key) or usual
        if not isinstance(name, str) or name not in self.activations:
            raise SourceError(
                f"config.json: {self.activation_key} is {name!r}",
                why=f"models of this family use {', '.join(self.activations)}",
                next=_COMPARE,
            )
        return self.activations[name]


def architecture_of(hf_config: Config) -> str | None:
    """`architectures[0]`, or None where the config has none."""
    architectures = hf_config.get("architectures")
    if isinstance(architectures, list) and architectures:
        return str(architectures[0])
    return None


def _key_value_heads(config: Config, keys: Mapping[str, str], defaults: Config, heads: int) -> int:
    # Llama's configs older than grouped attention have no key: one KV head for each query head. In transformers, null
    # means that in every family, and an absent key the number of the family's first model.
    key = keys.get("num_key_value_heads", "num_key_value_heads")
    count = positive_int(config, key, heads if key in config else defaults.get(key, heads))
    if heads % count:
        raise SourceError(
            f"config.json: {keys.get('num_attention_heads', 'num_attention_heads')} {heads} is not a multiple of "
            f"{key} {count}",
            why="each KV head serves the same number of query heads",
            next=_COMPARE,
        )
    return count


def _head_size(config: Config, keys: Mapping[str, str], hidden: int, heads: int, default: int | None) -> int:
    if config.get("head_dim") is None and default is None and hidden % heads:
        raise SourceError(
            f"config.json: {keys.get('hidden_size', 'hidden_size')} {hidden} is not a multiple of "
            f"{keys.get('num_attention_heads', 'num_attention_heads')} {heads}, and head_dim is not given",
            why="the size of a head is hidden_size / num_attention_heads unless head_dim says otherwise",
            next=_COMPARE,
        )
    size = positive_int(config, "head_dim", default or hidden // heads)
    if size % 2:
        raise SourceError(
            f"config.json: the size of a head is {size}",
            why="RoPE turns pairs of dimensions, so it must be even",
            next=_COMPARE,
        )
    return size


def _bias(config: Config, defaults: Config, rule: bool | str) -> bool:
    return flag(config, rule, defaults.get(rule, False)) if isinstance(rule, str) else rule
