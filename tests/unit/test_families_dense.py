"""The traps of each dense family: what its config means, what TensorRT-LLM's config gets, and the way back."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from family_configs import VARIANTS, shape

from lpxbuild.checkpoint.config import model_fields, shape_from_config
from lpxbuild.checkpoint.layout import plan
from lpxbuild.errors import SourceError
from lpxbuild.families import attention_features, check_parallel, families, family_for
from lpxbuild.families.table import markdown


def fields(family: str, **changes: Any) -> dict[str, Any]:
    return model_fields(shape(family, **changes), "bfloat16")


@pytest.mark.parametrize(("family", "changes"), VARIANTS)
def test_config_json_gives_the_shape_back(family: str, changes: dict[str, Any]) -> None:
    model = shape(family, **changes)
    assert shape_from_config(model_fields(model, model.dtype)) == model


class TestGemma:
    @pytest.mark.parametrize("family", ["gemma", "gemma2", "gemma3_text"])
    def test_every_norm_is_stored_plus_one_and_nothing_else(self, family: str) -> None:
        for tensor in plan(shape(family), 1, 1):
            assert tensor.plus_one == ("layernorm" in tensor.name or "ln_f" in tensor.name), tensor.name

    def test_the_embedding_is_scaled_by_the_network(self) -> None:
        assert shape("gemma").embedding_multiplier == 8.0
        assert "embedding_multiplier" not in fields("gemma")

    def test_heads_of_256_whatever_the_hidden_size_is(self) -> None:
        assert shape("gemma", head_dim="absent").head_size == 256

    @pytest.mark.parametrize(
        "activation",
        [{"hidden_act": "gelu"}, {"hidden_activation": "gelu_pytorch_tanh"}, {"hidden_act": "gelu_pytorch_tanh"}],
    )
    def test_the_first_release_says_gelu_and_means_tanh(self, activation: dict[str, str]) -> None:
        found = fields("gemma", **activation)
        assert (found["lpx"]["hidden_act"], found["hidden_act"]) == ("gelu_tanh", "gelu_pytorch_tanh")

    def test_embeddings_are_tied_where_the_config_is_silent(self) -> None:
        assert shape("gemma").tie_word_embeddings is True

    def test_two_stages_are_refused_with_the_ranks_that_work(self) -> None:
        with pytest.raises(SourceError) as caught:
            check_parallel(shape("gemma"), 1, 2)
        assert "pipeline parallel 2" in caught.value.what
        assert "1, 2, 4" in caught.value.next

    def test_a_vocabulary_that_cannot_be_shared_out_is_refused(self) -> None:
        with pytest.raises(SourceError, match="vocab_size 321 cannot be split over tensor parallel 2"):
            check_parallel(shape("gemma", vocab_size=321), 2, 1)
        check_parallel(shape("gemma", vocab_size=321), 1, 1)

    def test_one_kv_head_is_on_every_rank(self) -> None:
        check_parallel(shape("gemma", num_key_value_heads=1), 4, 1)


class TestGemma2:
    def test_what_transformers_takes_where_the_config_is_silent(self) -> None:
        found = shape("gemma2")
        assert (found.attn_softcap, found.final_softcap, found.sliding_window) == (50.0, 30.0, 4096)
        assert found.attention_scale == 1 / 16
        assert found.layer_types == ("sliding_attention", "full_attention") * 2

    def test_null_switches_caps_and_window_off(self) -> None:
        off = {"attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": None}
        found = shape("gemma2", **off)
        assert (found.attn_softcap, found.final_softcap, found.sliding_window, found.layer_types) == (None,) * 4

    def test_features(self) -> None:
        assert attention_features(shape("gemma2", sliding_window=8), 128) == (
            "sliding_window",
            "mixed_layers",
            "soft_cap",
        )
        assert attention_features(shape("gemma2"), 128) == ("soft_cap",)

    def test_trtllm_gets_the_scalar_itself(self) -> None:
        found = fields("gemma2", query_pre_attn_scalar=144)
        assert (found["query_pre_attn_scalar"], found["attn_logit_softcapping"]) == (144, 50.0)
        assert found["inter_layernorms"] is True


class TestGemma3:
    def test_every_sixth_layer_is_full(self) -> None:
        found = shape("gemma3_text", num_hidden_layers=7)
        assert found.layer_types == (*("sliding_attention",) * 5, "full_attention", "sliding_attention")
        assert (found.rotary_base, found.rotary_local_base) == (1e6, 1e4)
        assert (found.qk_norm, found.sandwich_norms) == (True, True)

    def test_trtllms_names_have_an_underscore(self) -> None:
        found = fields("gemma3_text", sliding_window_pattern=2)
        assert (found["_sliding_window_pattern"], found["sliding_window"]) == (2, 8)
        assert found["rope_local_base_freq"] == 10000.0

    def test_rope_parameters_by_type_of_layer(self) -> None:
        """transformers 5 writes one set for each type."""
        found = shape(
            "gemma3_text",
            rope_parameters={
                "full_attention": {"rope_type": "default", "rope_theta": 5e5},
                "sliding_attention": {"rope_type": "default", "rope_theta": 2e4},
            },
        )
        assert (found.rotary_base, found.rotary_local_base, found.rotary_scaling) == (5e5, 2e4, None)

    def test_rope_scaled_in_the_full_layers_only_has_no_place_in_trtllm(self) -> None:
        """Its attention gives the scaling to the tables of both bases."""
        scaled = shape("gemma3_text", rope_scaling={"rope_type": "linear", "factor": 8.0})
        with pytest.raises(SourceError, match="RoPE is scaled") as caught:
            list(plan(scaled, 1, 1))
        assert "pytorch or vllm" in caught.value.next
        assert list(plan(scaled, 1, 1, layout="unified_hf"))

    def test_an_uneven_row_of_layer_types_has_no_place_in_trtllm(self) -> None:
        kinds = ["full_attention", *["sliding_attention"] * 3]
        with pytest.raises(SourceError, match="layer_types do not follow each other evenly"):
            list(plan(shape("gemma3_text", layer_types=kinds), 1, 1))

    def test_features(self) -> None:
        assert attention_features(shape("gemma3_text", sliding_window_pattern=2)) == (
            "sliding_window",
            "mixed_layers",
            "two_rope_bases",
        )

    def test_scores_have_no_cap_whatever_the_config_says(self) -> None:
        """transformers' class reads the key and does not use it."""
        found = shape("gemma3_text", attn_logit_softcapping=50.0, final_logit_softcapping=30.0)
        assert (found.attn_softcap, found.final_softcap) == (None, 30.0)

    def test_attention_to_both_sides_is_refused(self) -> None:
        with pytest.raises(SourceError, match="use_bidirectional_attention is true"):
            shape("gemma3_text", use_bidirectional_attention=True)


FACTORS = {"short_factor": [1.0 + n / 8 for n in range(8)], "long_factor": [2.0 + n for n in range(8)]}


class TestPhi3:
    def long(self, kind: str = "longrope", **changes: Any) -> dict[str, Any]:
        scaling = {"type": kind, **FACTORS, **changes}
        return {"max_position_embeddings": 512, "original_max_position_embeddings": 64, "rope_scaling": scaling}

    @pytest.mark.parametrize("kind", ["longrope", "su", "yarn"])
    def test_names_that_longrope_had(self, kind: str) -> None:
        assert shape("phi3", **self.long(kind)).rotary_scaling == {
            "rope_type": "longrope",
            **FACTORS,
            "original_max_position_embeddings": 64,
            "attention_factor": math.sqrt(1 + math.log(8) / math.log(64)),
        }

    def test_trtllms_own_fields(self) -> None:
        model = shape("phi3", **self.long())
        found = model_fields(model, "bfloat16")
        assert found["position_embedding_type"] == "long_rope"
        assert found["rotary_scaling"] is None
        assert found["original_max_position_embeddings"] == 64
        assert found["longrope_scaling_short_factors"] == FACTORS["short_factor"]
        assert found["longrope_scaling_long_factors"] == FACTORS["long_factor"]
        assert found["hidden_act"] == "swiglu"
        assert shape_from_config(found) == model

    def test_rope_parameters_of_transformers_5(self) -> None:
        parameters = {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "partial_rotary_factor": 0.5,
            "original_max_position_embeddings": 64,
            "short_factor": [1.0] * 4,
            "long_factor": [2.0] * 4,
        }
        found = shape("phi3", max_position_embeddings=512, rope_parameters=parameters)
        assert found.rotary_pct == 0.5
        assert (found.rotary_scaling or {})["original_max_position_embeddings"] == 64

    def test_as_many_factors_as_turning_pairs(self) -> None:
        with pytest.raises(SourceError, match="short_factor has 8 numbers"):
            shape("phi3", partial_rotary_factor=0.5, **self.long())

    def test_a_magnitude_of_its_own_has_no_place_in_trtllm(self) -> None:
        with pytest.raises(SourceError, match=r"attention_factor 1\.5"):
            shape("phi3", **self.long(attention_factor=1.5))

    def test_other_scalings_have_no_place_in_trtllm(self) -> None:
        with pytest.raises(SourceError, match="'linear'"):
            shape("phi3", rope_scaling={"type": "linear", "factor": 2.0})

    def test_heads_of_another_size_have_no_place_in_trtllm(self) -> None:
        with pytest.raises(SourceError, match="head_dim is 32"):
            shape("phi3", head_dim=32)

    def test_features(self) -> None:
        assert attention_features(shape("phi3", **self.long())) == ("long_rope",)
        assert attention_features(shape("phi3", **self.long()), max_seq_len=64) == ()

    def test_pipeline_and_copies_of_kv_heads_are_refused(self) -> None:
        with pytest.raises(SourceError, match="pipeline parallel 2"):
            check_parallel(shape("phi3"), 1, 2)
        with pytest.raises(SourceError, match="num_key_value_heads 2 cannot be split over tensor parallel 4") as caught:
            check_parallel(shape("phi3"), 4, 1)
        assert caught.value.next.endswith("1, 2")


class TestGpt2:
    def test_keys_and_defaults(self) -> None:
        found = shape("gpt2")
        assert (found.intermediate_size, found.head_size, found.num_key_value_heads) == (256, 16, 4)
        assert (found.position, found.norm, found.mlp, found.hidden_act) == ("learned", "layer", "plain", "gelu_tanh")
        assert found.tie_word_embeddings

    def test_a_missing_size_is_named_as_the_config_names_it(self) -> None:
        with pytest.raises(SourceError, match="no 'n_embd'"):
            shape("gpt2", n_embd="absent")

    def test_trtllms_fields(self) -> None:
        found = fields("gpt2")
        assert (found["gpt_variant"], found["hidden_act"], found["bias"]) == ("gpt2", "gelu_new", True)
        assert found["position_embedding_type"] == "learned_absolute"
        assert "rotary_base" not in found
        assert fields("gpt2", scale_attn_weights=False)["q_scaling"] == 1 / 4

    def test_a_scale_of_each_layer_has_no_place_in_trtllm(self) -> None:
        with pytest.raises(SourceError, match="scale_attn_by_inverse_layer_idx"):
            shape("gpt2", scale_attn_by_inverse_layer_idx=True)

    def test_positions_that_cannot_be_shared_out_are_refused(self) -> None:
        with pytest.raises(SourceError, match="n_positions 126 cannot be split over tensor parallel 4") as caught:
            check_parallel(shape("gpt2", n_positions=126), 4, 1)
        assert caught.value.next.endswith("1, 2")


class TestGranite:
    def test_the_scale_of_attention_is_the_multiplier_alone(self) -> None:
        """transformers' default 1.0 is no scaling at all; TensorRT-LLM's default 1.0 is 1/√head_size."""
        assert shape("granite").attention_scale == 1.0
        assert fields("granite")["attention_multiplier"] == 4.0

    def test_logits_are_divided(self) -> None:
        assert shape("granite", logits_scaling=8.0).logits_divisor == 8.0
        assert fields("granite", logits_scaling=8.0)["output_multiplier_scale"] == 0.125

    def test_no_other_family_has_the_multipliers(self) -> None:
        """They are arguments of TensorRT-LLM's class since 1.0: earlier versions do not know them."""
        assert "residual_multiplier" in fields("granite")
        assert not {"residual_multiplier", "output_multiplier_scale"} & set(fields("internlm2"))


class TestFalcon:
    @pytest.mark.parametrize(
        ("changes", "kv_heads", "norms", "parallel"),
        [
            ({}, 1, 1, True),
            ({"num_kv_heads": 4}, 1, 1, True),  # 7B: multi_query wins
            ({"multi_query": False}, 4, 1, True),
            ({"multi_query": False, "num_kv_heads": 2, "parallel_attn": False}, 4, 1, False),  # RW: heads win
            ({"new_decoder_architecture": True, "num_kv_heads": 2}, 2, 2, True),  # 40B: multi_query is ignored
            ({"new_decoder_architecture": True, "num_kv_heads": 2, "num_ln_in_parallel_attn": 1}, 2, 1, True),
        ],
    )
    def test_who_decides_over_kv_heads_and_norms(
        self, changes: dict[str, Any], kv_heads: int, norms: int, parallel: bool
    ) -> None:
        found = shape("falcon", **changes)
        assert (found.num_key_value_heads, found.num_ln_in_parallel_attn) == (kv_heads, norms)
        assert found.parallel_attention is parallel

    def test_gelu_is_the_exact_one(self) -> None:
        """TensorRT-LLM runs its tanh approximation under the same name; the embedded engine runs what is meant."""
        assert (fields("falcon")["hidden_act"], fields("falcon")["lpx"]["hidden_act"]) == ("gelu", "gelu")

    def test_alibi_is_scaled_with_the_scores(self) -> None:
        found = shape("falcon", alibi=True)
        assert model_fields(found, "float16")["position_embedding_type"] == "alibi_with_scale"
        assert attention_features(found) == ("alibi",)

    def test_scaled_rope_has_no_place_in_trtllm(self) -> None:
        with pytest.raises(SourceError, match="'linear'"):
            shape("falcon", rope_scaling={"rope_type": "linear", "factor": 2.0})

    def test_biases_of_parallel_layers_have_no_place_in_trtllm(self) -> None:
        with pytest.raises(SourceError, match="parallel_attn and bias are both true"):
            list(plan(shape("falcon", bias=True), 1, 1))


class TestInternlm2:
    def test_rope_that_changes_beyond_the_context_is_plain_within(self) -> None:
        dynamic = shape("internlm2", rope_scaling={"type": "dynamic", "factor": 2.0})
        assert model_fields(dynamic, "bfloat16")["rotary_scaling"] is None
        assert (attention_features(dynamic, 128), attention_features(dynamic, 129)) == ((), ("long_rope",))
        linear = {"rope_type": "linear", "factor": 2.0}
        assert shape("internlm2", rope_scaling={"type": "linear", "factor": 2.0}).rotary_scaling == linear

    def test_bias_is_on_both_projections(self) -> None:
        found = shape("internlm2", bias="absent")
        assert (found.qkv_bias, found.dense_bias, found.mlp_bias) == (True, True, False)


class TestModelsOfImagesAndText:
    @pytest.mark.parametrize(
        ("architecture", "inner", "words"),
        [
            ("Gemma3ForConditionalGeneration", "gemma3_text", "Gemma3ForCausalLM (gemma3_text)"),
            ("Mistral3ForConditionalGeneration", "mistral", "MistralForCausalLM (mistral)"),
            ("LlavaForConditionalGeneration", "llama", "LlamaForCausalLM (llama)"),
        ],
    )
    def test_the_text_part_is_named_and_how_to_take_it_out(self, architecture: str, inner: str, words: str) -> None:
        config = {"architectures": [architecture], "model_type": "images", "text_config": {"model_type": inner}}
        with pytest.raises(SourceError) as caught:
            family_for(config)
        assert architecture in caught.value.what
        assert words in caught.value.why
        assert "docs/families.md" in caught.value.next

    def test_a_text_part_of_an_unknown_family(self) -> None:
        config = {"architectures": ["FooForConditionalGeneration"], "text_config": {"model_type": "foo"}}
        with pytest.raises(SourceError, match="FooForConditionalGeneration") as caught:
            family_for(config)
        assert "model_type foo" in caught.value.why


class TestTable:
    @pytest.mark.parametrize(("family", "changes"), VARIANTS)
    def test_every_feature_of_a_model_is_named_by_its_family(self, family: str, changes: dict[str, Any]) -> None:
        assert set(attention_features(shape(family, **changes))) <= set(families()[family].attention)

    def test_a_row_says_splits_executors_and_comparisons(self) -> None:
        executors = {"sliding_window": "paged", "mixed_layers": "paged", "soft_cap": "stateful"}
        lines = markdown(executors, lambda family: f"formats of {family.name}").splitlines()
        rows = {line.split("`")[1]: line for line in lines if line.startswith("| `")}
        assert set(rows) == set(families())
        assert rows["gpt2"] == (
            "| `gpt2` | `GPT2LMHeadModel` | `n_head`, `n_inner`, `n_positions` | yes | plain: paged | formats of gpt2 "
            "| oracle, transformers' logits |"
        )
        assert "`num_key_value_heads`" in rows["phi3"]
        assert "`long_rope`: refused" in rows["phi3"]
        assert "`soft_cap`: stateful" in rows["gemma2"]
        assert "| no |" in rows["gemma2"]


def test_what_only_tensorrt_llm_cannot_do_is_no_matter_elsewhere() -> None:
    check_parallel(shape("phi3"), 4, 2, layout="unified_hf")
    check_parallel(shape("gemma", vocab_size=321), 2, 1, layout="unified_hf")
    with pytest.raises(SourceError, match="num_attention_heads 4 cannot be split over tensor parallel 8") as caught:
        check_parallel(shape("phi3"), 8, 1, layout="unified_hf")
    assert caught.value.next.endswith("1, 2, 4")
