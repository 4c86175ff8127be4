"""Reading of Hugging Face configs, the tensors they ask for, and the splits they allow."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

import lpxbuild.families
from lpxbuild.errors import SourceError
from lpxbuild.families import (
    ModelShape,
    attention_features,
    check_parallel,
    families,
    family_for,
    stage_layers,
    tensor_parallel_sizes,
)

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def hf_config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    config = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "torch_dtype": "bfloat16",
        **changes,
    }
    return {key: value for key, value in config.items() if value != "absent"}


def shape(family: str = "llama", **changes: Any) -> ModelShape:
    config = hf_config(family, **changes)
    return family_for(config).model_shape(config)


class TestRegistry:
    def test_each_family_is_one_file(self) -> None:
        folder = Path(lpxbuild.families.__file__).parent
        assert set(ARCHITECTURES) <= set(families())
        for name in families():
            assert "FAMILY = Family(" in (folder / f"{name}.py").read_text()

    def test_unknown_architecture_names_the_supported_ones(self) -> None:
        with pytest.raises(SourceError) as caught:
            family_for(hf_config(architectures=["FooForCausalLM"], model_type="foo"))
        assert "FooForCausalLM" in str(caught.value)
        for architecture in ARCHITECTURES.values():
            assert architecture in caught.value.why

    def test_model_type_alone_is_enough(self) -> None:
        assert shape("qwen2", architectures="absent").architecture == "Qwen2ForCausalLM"

    def test_head_of_another_task_is_refused(self) -> None:
        with pytest.raises(SourceError, match="LlamaForSequenceClassification"):
            family_for(hf_config(architectures=["LlamaForSequenceClassification"]))

    def test_class_and_type_that_disagree_are_refused(self) -> None:
        with pytest.raises(SourceError, match="model_type mistral"):
            family_for(hf_config(model_type="mistral"))


class TestSilentKeys:
    """What transformers 4.57 takes where config.json says nothing (its config classes' defaults)."""

    def test_old_llama(self) -> None:
        found = shape(
            num_key_value_heads="absent", max_position_embeddings="absent", rms_norm_eps="absent", torch_dtype="absent"
        )
        assert (found.num_key_value_heads, found.head_size) == (4, 16)
        assert (found.rotary_base, found.rotary_scaling) == (10000.0, None)
        assert (found.max_position_embeddings, found.norm_epsilon) == (2048, 1e-6)
        assert found.tie_word_embeddings is False
        assert found.dtype == "float16"

    def test_stored_dtype_answers_for_a_silent_config(self) -> None:
        config = hf_config(torch_dtype="absent")
        assert family_for(config).model_shape(config, stored_dtype="float32").dtype == "float32"

    def test_explicit_head_dim_wins(self) -> None:
        assert shape(head_dim=32).head_size == 32
        assert shape("mistral", head_dim=None).head_size == 16

    def test_qwen3_has_heads_of_128(self) -> None:
        assert shape("qwen3").head_size == 128

    def test_dtype_of_transformers_5(self) -> None:
        assert shape(torch_dtype="absent", dtype="float32").dtype == "float32"


class TestRope:
    def test_rope_parameters_of_transformers_5(self) -> None:
        found = shape(rope_parameters={"rope_theta": 1000000.0, "rope_type": "default"})
        assert (found.rotary_base, found.rotary_scaling) == (1000000.0, None)
        found = shape(rope_parameters={"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0})
        assert (found.rotary_base, found.rotary_scaling) == (5e5, {"rope_type": "linear", "factor": 2.0})

    def test_two_bases_that_disagree(self) -> None:
        with pytest.raises(SourceError, match=r"rope_theta 10000 and rope_parameters.rope_theta 1e\+06"):
            shape(rope_theta=10000.0, rope_parameters={"rope_theta": 1000000.0})

    def test_old_key_type(self) -> None:
        assert shape(rope_scaling={"type": "linear", "factor": 4.0}).rotary_scaling == {
            "rope_type": "linear",
            "factor": 4.0,
        }

    def test_default_is_no_scaling(self) -> None:
        assert shape(rope_scaling={"rope_type": "default"}).rotary_scaling is None

    def test_llama3_keeps_all_five_numbers(self) -> None:
        scaling = {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }
        assert shape(rope_scaling=scaling).rotary_scaling == scaling

    def test_llama3_without_a_number_is_refused(self) -> None:
        with pytest.raises(SourceError, match="low_freq_factor"):
            shape(rope_scaling={"rope_type": "llama3", "factor": 8.0})

    def test_yarn_defaults_are_those_of_transformers(self) -> None:
        """TensorRT-LLM's default for original_max_position_embeddings is 4096, transformers' the model's own."""
        assert shape(rope_scaling={"rope_type": "yarn", "factor": 4.0}).rotary_scaling == {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "mscale": 1.0,
            "mscale_all_dim": 0.0,
        }

    @pytest.mark.parametrize(
        ("given", "attention_factor"),
        [
            ({}, 0.1 * math.log(4) + 1),
            ({"attention_factor": 1.5}, 1.5),
            ({"mscale": 0.7}, 0.1 * math.log(4) + 1),
            ({"mscale": 0.7, "mscale_all_dim": 0.5}, (0.07 * math.log(4) + 1) / (0.05 * math.log(4) + 1)),
        ],
    )
    def test_yarn_attention_factor_survives_in_trtllms_terms(
        self, given: dict[str, float], attention_factor: float
    ) -> None:
        """transformers' attention factor equals what TensorRT-LLM makes of mscale and mscale_all_dim."""
        scaling = shape(rope_scaling={"rope_type": "yarn", "factor": 4.0, **given}).rotary_scaling
        assert scaling is not None
        ours = (0.1 * scaling["mscale"] * math.log(4) + 1) / (0.1 * scaling["mscale_all_dim"] * math.log(4) + 1)
        assert ours == pytest.approx(attention_factor, rel=1e-12)

    @pytest.mark.parametrize("kind", ["martian", "dynamic", "longrope", "su", "mrope"])
    def test_other_kinds_are_named_with_the_supported_ones(self, kind: str) -> None:
        with pytest.raises(SourceError) as caught:
            shape(rope_scaling={"rope_type": kind, "factor": 2.0})
        assert kind in caught.value.what
        assert "default, linear, llama3, yarn" in caught.value.why

    def test_partial_rotation_is_refused(self) -> None:
        with pytest.raises(SourceError, match=r"partial_rotary_factor is 0\.5"):
            shape(partial_rotary_factor=0.5)

    def test_rope_by_layer_type_is_refused(self) -> None:
        with pytest.raises(SourceError, match="rope_parameters"):
            shape(rope_parameters={"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}})


class TestWindow:
    def test_mistral(self) -> None:
        assert shape("mistral", sliding_window=8).sliding_window == 8
        assert shape("mistral", sliding_window=None).sliding_window is None

    def test_mistral_without_the_key_has_transformers_default(self) -> None:
        assert shape("mistral").sliding_window == 4096

    def test_llama_has_none_whatever_the_config_says(self) -> None:
        assert shape(sliding_window=8).sliding_window is None

    @pytest.mark.parametrize("family", ["qwen2", "qwen3"])
    def test_qwen_needs_the_switch(self, family: str) -> None:
        assert shape(family, sliding_window=8, use_sliding_window=False).sliding_window is None
        assert shape(family, sliding_window=8).sliding_window is None

    def test_qwen_window_begins_at_max_window_layers(self) -> None:
        found = shape("qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=3)
        assert found.sliding_window == 8
        assert found.layer_types == ("full_attention",) * 3 + ("sliding_attention",)
        assert attention_features(found) == ("sliding_window", "mixed_layers")

    def test_qwen_window_on_all_layers(self) -> None:
        found = shape("qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=0)
        assert (found.sliding_window, found.layer_types) == (8, None)
        assert attention_features(found) == ("sliding_window",)

    def test_qwen_window_that_no_layer_uses(self) -> None:
        assert shape("qwen2", sliding_window=8, use_sliding_window=True, max_window_layers=28).sliding_window is None

    def test_layer_types_win(self) -> None:
        types = ["sliding_attention", "full_attention"] * 2
        found = shape("qwen3", sliding_window=8, use_sliding_window=True, layer_types=types)
        assert found.layer_types == tuple(types)

    def test_layer_types_without_a_window_are_refused(self) -> None:
        with pytest.raises(SourceError, match="no sliding window is switched on"):
            shape("qwen2", layer_types=["sliding_attention"] * 4)

    @pytest.mark.parametrize("types", [["full_attention"], ["chunked_attention"] * 4])
    def test_layer_types_that_do_not_fit_are_refused(self, types: list[str]) -> None:
        with pytest.raises(SourceError, match="layer_types"):
            shape("qwen2", layer_types=types)

    @pytest.mark.parametrize(
        "wrong", [{"layer_types": 4}, {"max_window_layers": None}, {"max_window_layers": "3"}], ids=str
    )
    def test_a_window_of_the_wrong_kind_is_named_with_its_key(self, wrong: dict[str, Any]) -> None:
        with pytest.raises(SourceError, match=f"{next(iter(wrong))} is"):
            shape("qwen2", sliding_window=8, use_sliding_window=True, **wrong)

    def test_a_window_that_no_sequence_leaves_is_no_feature(self) -> None:
        found = shape("mistral", sliding_window=8)
        assert attention_features(found) == ("sliding_window",)
        assert attention_features(found, max_seq_len=8) == ()
        assert attention_features(found, max_seq_len=9) == ("sliding_window",)
        assert attention_features(shape()) == ()


class TestBiases:
    @pytest.mark.parametrize(
        ("family", "changes", "biases"),
        [
            ("llama", {}, (False, False, False)),
            ("llama", {"attention_bias": True}, (True, True, False)),
            ("llama", {"mlp_bias": True}, (False, False, True)),
            ("mistral", {"attention_bias": True}, (False, False, False)),  # transformers' Mistral has none
            ("qwen2", {}, (True, False, False)),  # no config key announces them
            ("qwen3", {"attention_bias": False}, (False, False, False)),
        ],
    )
    def test_who_has_which(self, family: str, changes: dict[str, Any], biases: tuple[bool, bool, bool]) -> None:
        found = shape(family, **changes)
        assert (found.qkv_bias, found.dense_bias, found.mlp_bias) == biases

    def test_qwen3_with_biases_has_no_place_in_trtllm(self) -> None:
        with pytest.raises(SourceError, match="attention_bias is true"):
            shape("qwen3", attention_bias=True)


class TestWrongValues:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"hidden_size": "absent"}, "has no 'hidden_size'"),
            ({"hidden_size": "64"}, "hidden_size is '64'"),
            ({"num_hidden_layers": 0}, "num_hidden_layers is 0"),
            ({"vocab_size": 3.5}, r"vocab_size is 3\.5"),
            ({"num_attention_heads": True}, "num_attention_heads is True"),
            ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of num_key_value_heads 3"),
            ({"hidden_size": 66}, "hidden_size 66 is not a multiple of num_attention_heads 4"),
            ({"head_dim": 15}, "the size of a head is 15"),
            ({"rms_norm_eps": 0}, "rms_norm_eps is 0"),
            ({"rope_theta": -1}, "rope_theta is -1"),
            ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
            ({"torch_dtype": "float8_e4m3fn"}, "dtype is 'float8_e4m3fn'"),
            ({"tie_word_embeddings": "yes"}, "tie_word_embeddings is 'yes'"),
            ({"rope_scaling": "linear"}, "rope_scaling is 'linear'"),
            ({"hidden_size": math.inf}, "hidden_size is inf"),
            ({"hidden_size": math.nan}, "hidden_size is nan"),
            ({"vocab_size": 2**31}, "vocab_size is 2147483648"),
            ({"rms_norm_eps": 10**400}, "rms_norm_eps is 1000"),
            ({"hidden_act": ["silu"]}, r"hidden_act is \['silu'\]"),
            ({"rope_scaling": {"rope_type": "yarn", "factor": 1.0, "attention_factor": 1.2}}, "attention_factor 1.2"),
        ],
    )
    def test_key_and_value_are_named(self, changes: dict[str, Any], message: str) -> None:
        with pytest.raises(SourceError, match=message):
            shape(**changes)


class TestTensors:
    def test_qwen2_by_hand(self) -> None:
        """hidden 64, 4 heads of 16, 2 KV heads, intermediate 128, vocabulary 320."""
        found = shape("qwen2", num_hidden_layers=1)
        tensors = {name: spec.shape for name, spec in families()["qwen2"].tensors(found).items()}
        layer = "model.layers.0."
        assert tensors == {
            "model.embed_tokens.weight": (320, 64),
            f"{layer}input_layernorm.weight": (64,),
            f"{layer}self_attn.q_proj.weight": (64, 64),
            f"{layer}self_attn.q_proj.bias": (64,),
            f"{layer}self_attn.k_proj.weight": (32, 64),
            f"{layer}self_attn.k_proj.bias": (32,),
            f"{layer}self_attn.v_proj.weight": (32, 64),
            f"{layer}self_attn.v_proj.bias": (32,),
            f"{layer}self_attn.o_proj.weight": (64, 64),
            f"{layer}post_attention_layernorm.weight": (64,),
            f"{layer}mlp.gate_proj.weight": (128, 64),
            f"{layer}mlp.up_proj.weight": (128, 64),
            f"{layer}mlp.down_proj.weight": (64, 128),
            "model.norm.weight": (64,),
            "lm_head.weight": (320, 64),
        }

    def test_qwen3_norms_of_heads(self) -> None:
        found = shape("qwen3")
        tensors = families()["qwen3"].tensors(found)
        assert tensors["model.layers.3.self_attn.q_norm.weight"].shape == (128,)
        assert tensors["model.layers.0.self_attn.k_norm.weight"].shape == (128,)
        assert tensors["model.layers.0.self_attn.o_proj.weight"].shape == (64, 512)

    def test_only_a_tied_head_may_be_missing(self) -> None:
        for tied in (True, False):
            found = shape(tie_word_embeddings=tied)
            tensors = families()["llama"].tensors(found)
            optional = {name for name, spec in tensors.items() if not spec.required}
            assert optional == ({"lm_head.weight"} if tied else set())


class TestSplits:
    @pytest.mark.parametrize(
        ("heads", "kv_heads", "intermediate", "sizes"),
        [
            (9, 3, 1536, (1, 3)),  # SmolLM2-135M: 1536 is no multiple of 9
            (6, 3, 192, (1, 3, 6)),
            (8, 4, 128, (1, 2, 4, 8)),
            (4, 4, 129, (1,)),
            (12, 2, 144, (1, 2, 4, 6, 12)),
        ],
    )
    def test_sizes_that_work(self, heads: int, kv_heads: int, intermediate: int, sizes: tuple[int, ...]) -> None:
        found = shape(
            num_attention_heads=heads, num_key_value_heads=kv_heads, intermediate_size=intermediate, head_dim=16
        )
        assert tensor_parallel_sizes(found) == sizes

    @pytest.mark.parametrize(
        ("changes", "tensor", "words"),
        [
            ({"num_attention_heads": 6, "num_key_value_heads": 6}, 4, ("num_attention_heads 6", "1, 2")),
            ({"num_attention_heads": 6, "num_key_value_heads": 3}, 2, ("num_key_value_heads 3", "1")),
            ({"intermediate_size": 129}, 2, ("intermediate_size 129", "1")),
        ],
    )
    def test_refusal_names_key_value_and_what_works(
        self, changes: dict[str, Any], tensor: int, words: tuple[str, str]
    ) -> None:
        found = shape(head_dim=16, **changes)
        with pytest.raises(SourceError) as caught:
            check_parallel(found, tensor, 1)
        assert words[0] in caught.value.what
        assert f"tensor parallel {tensor}" in caught.value.what
        assert words[1] in caught.value.next

    def test_more_stages_than_layers(self) -> None:
        with pytest.raises(SourceError, match="num_hidden_layers 4 cannot be split over pipeline parallel 5"):
            check_parallel(shape(), 1, 5)

    def test_first_stages_take_the_remainder(self) -> None:
        assert stage_layers(10, 4) == [range(3), range(3, 6), range(6, 8), range(8, 10)]
        assert stage_layers(4, 1) == [range(4)]


@pytest.mark.parametrize(
    ("family", "absent"),
    [
        ("LlamaForCausalLM llama", 64),
        ("MistralForCausalLM mistral", 8),
        ("MixtralForCausalLM mixtral", 8),
        ("Qwen2ForCausalLM qwen2", 32),
        ("Qwen2MoeForCausalLM qwen2_moe", 16),
        ("Qwen3ForCausalLM qwen3", 32),
        ("Qwen3MoeForCausalLM qwen3_moe", 4),
    ],
)
def test_kv_heads_that_config_does_not_name(family: str, absent: int) -> None:
    """transformers 4.57: `Config(num_attention_heads=64).num_key_value_heads`, and the same with null given."""
    architecture, kind = family.split()
    config = {
        "architectures": [architecture],
        "model_type": kind,
        "hidden_size": 1024,
        "intermediate_size": 1024,
        "num_hidden_layers": 1,
        "num_attention_heads": 64,
        "vocab_size": 128,
    }
    assert family_for(config).model_shape(config).num_key_value_heads == absent
    assert family_for(config).model_shape({**config, "num_key_value_heads": None}).num_key_value_heads == 64
