"""The list of formats, the sizes kernels take, and TensorRT-LLM's weight-only rule worked by hand."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from typing import get_args

import ml_dtypes
import numpy as np
import pytest

from lpxbuild.errors import LpxError, RecipeError, SourceError
from lpxbuild.families import ModelShape, family_for
from lpxbuild.quantization import FORMATS, check_kv_cache, check_shapes, format_for, markdown_table
from lpxbuild.quantization.scheme import Scheme
from lpxbuild.quantization.weight_only import quantize
from lpxbuild.recipe import schema

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def shape(**changes: object) -> ModelShape:
    """SmolLM2-135M unless changed."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
        **changes,
    }
    return family_for(config).model_shape(config)


class TestFormats:
    def test_recipes_know_the_same_list(self) -> None:
        assert tuple(FORMATS) == get_args(schema.Format)

    def test_algorithms_are_trtllms(self) -> None:
        """Names of TensorRT-LLM's QuantAlgo for the qformats of its quantize.py."""
        assert {name: row.quant_algo for name, row in FORMATS.items()} == {
            "none": None,
            "int8_wo": "W8A16",
            "int4_wo": "W4A16",
            "int4_rtn": "W4A16_AWQ",
            "int4_awq": "W4A16_AWQ",
            "w4a8_awq": "W4A8_AWQ",
            "int8_sq": "W8A8_SQ_PER_CHANNEL",
            "fp8": "FP8",
            "fp8_pc_pt": "FP8_PER_CHANNEL_PER_TOKEN",
            "nvfp4": "NVFP4",
            "w4a16_nvfp4": "W4A16_NVFP4",
        }

    @pytest.mark.parametrize(
        ("name", "backend", "what", "usable"),
        [
            ("int3", None, "'int3' is not known", ", ".join(FORMATS)),
            (
                "w4a16_nvfp4",
                "tensorrt",
                "cannot be executed by backend tensorrt",
                "none, int8_wo, int4_wo, int4_rtn, int4_awq, w4a8_awq, int8_sq, fp8, fp8_pc_pt, nvfp4",
            ),
            ("int8_wo", "vllm", "cannot be executed by backend vllm", "none, fp8, fp8_pc_pt, nvfp4, w4a16_nvfp4"),
            (
                "int8_sq",
                "pytorch",
                "cannot be executed by backend pytorch",
                "none, int4_awq, w4a8_awq, fp8, fp8_pc_pt, nvfp4",
            ),
        ],
    )
    def test_refusals_name_what_can_be_used(self, name: str, backend: str | None, what: str, usable: str) -> None:
        with pytest.raises(RecipeError) as caught:
            format_for(name, backend=backend)
        assert what in caught.value.what
        assert caught.value.next.endswith(f": {usable}")

    def test_the_embedded_engine_executes_every_format(self) -> None:
        assert all(format_for(name, backend="openvino") for name in FORMATS)

    def test_kv_caches(self) -> None:
        """A unified checkpoint has no scales for INT8 (ModelOpt: "Invalid KV cache quantization format")."""
        for name, backend in (("none", "vllm"), ("fp8", "pytorch"), ("int8", "tensorrt"), ("int8", None)):
            check_kv_cache(name, backend=backend)
        for backend in ("pytorch", "vllm"):
            with pytest.raises(RecipeError, match="kv_cache int8"):
                check_kv_cache("int8", backend=backend)
        with pytest.raises(RecipeError, match="'int4' is not known"):
            check_kv_cache("int4")

    def test_table_has_a_row_for_each(self) -> None:
        lines = markdown_table().splitlines()
        assert len(lines) == 2 + len(FORMATS)
        assert all(line.count("|") == lines[0].count("|") for line in lines)


class TestSizes:
    @pytest.mark.parametrize("tensor_parallel", [1, 3])
    @pytest.mark.parametrize("name", ["int8_wo", "int4_wo"])
    def test_smollm2_fits(self, name: str, tensor_parallel: int) -> None:
        """576 = 9·64, (9 + 2·3)·64 = 960 and 1536 are multiples of 64·3 = 192."""
        check_shapes(shape(), Scheme(name), tensor_parallel)

    def test_none_has_no_rule(self) -> None:
        check_shapes(shape(hidden_size=66, num_attention_heads=1, num_key_value_heads=1, head_dim=66), Scheme(), 1)

    def test_refusal_names_size_value_ranks_and_what_works(self) -> None:
        """192 = 3·64 allows one rank; 128 = 2·64 would be needed for two."""
        small = shape(hidden_size=256, intermediate_size=192, num_attention_heads=4, num_key_value_heads=2)
        with pytest.raises(SourceError) as caught:
            check_shapes(small, Scheme("int8_wo"), 2)
        assert "intermediate_size 192" in caught.value.what
        assert "tensor parallel 2" in caught.value.what
        assert "128" in caught.value.why
        assert "one of: 1," in caught.value.next

    def test_nothing_works(self) -> None:
        odd = shape(hidden_size=100, num_attention_heads=4, num_key_value_heads=4, head_dim=25 * 2)
        with pytest.raises(SourceError, match="hidden_size 100") as caught:
            check_shapes(odd, Scheme("int4_wo"), 1)
        assert caught.value.next == "set quantization.format to none: no tensor parallel size of this model fits"

    def test_copies_of_kv_heads_count(self) -> None:
        """4 query heads and 2 KV heads of 48 on 4 ranks: rows (4 + 2·4)·48 = 576 are no multiple of 256."""
        few = shape(hidden_size=256, intermediate_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=64)
        check_shapes(few, Scheme("int8_wo"), 1)
        check_shapes(few, Scheme("int8_wo"), 4)  # (4 + 2·4)·64 = 768
        with pytest.raises(SourceError, match="num_attention_heads"):
            check_shapes(
                shape(hidden_size=256, num_attention_heads=4, num_key_value_heads=2, head_dim=48), Scheme("int8_wo"), 4
            )


MIXTRAL = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "vocab_size": 512,
}
GPT2 = {
    "architectures": ["GPT2LMHeadModel"],
    "model_type": "gpt2",
    "n_embd": 128,
    "n_head": 4,
    "n_layer": 2,
    "n_positions": 64,
    "vocab_size": 512,
}


def refusal(model: ModelShape, scheme: Scheme, tensor_parallel: int = 1) -> LpxError:
    with pytest.raises((RecipeError, SourceError)) as caught:
        check_shapes(model, scheme, tensor_parallel)
    return caught.value


class TestSizesOfEveryFormat:
    """One model that does not fit for each rule; each says what would work."""

    def test_groups_of_int4(self) -> None:
        """192 = 3·64: no multiple of 128, one of 64."""
        model = shape(hidden_size=128, intermediate_size=192, num_attention_heads=2, num_key_value_heads=2)
        error = refusal(model, Scheme("int4_awq", group_size=128))
        assert (
            error.what
            == "intermediate_size 192 does not fit int4_awq with tensor parallel 1 (tp_size) and group_size 128"
        )
        assert "128" in (error.why or "")
        assert error.next == "set quantization.group_size to 64, or quantization.format to none"
        check_shapes(model, Scheme("int4_awq", group_size=64), 1)
        check_shapes(model, Scheme("int4_rtn", group_size=64), 1)

    def test_groups_over_ranks(self) -> None:
        """hidden_size 128 in groups of 64 is two groups: enough for 2 ranks, not for 4."""
        model = shape(hidden_size=128, intermediate_size=512, num_attention_heads=8, num_key_value_heads=8, head_dim=64)
        check_shapes(model, Scheme("int4_rtn", group_size=64), 2)
        error = refusal(model, Scheme("int4_rtn", group_size=64), 4)
        assert "hidden_size 128" in error.what
        assert "64 × 4 = 256" in (error.why or "")
        assert "set parallel.tensor to one of: 1, 2" in (error.next or "")

    def test_w4a8_has_groups_of_128_only(self) -> None:
        error = refusal(shape(), Scheme("w4a8_awq", group_size=64))
        assert "group_size 64" in error.what
        assert "128" in (error.next or "")

    def test_smollm2_cannot_have_w4a8(self) -> None:
        """576 is no multiple of 128, and no other size helps."""
        error = refusal(shape(), Scheme("w4a8_awq", group_size=128))
        assert "hidden_size 576" in error.what
        assert error.next == "set quantization.format to none: no tensor parallel size of this model fits"

    def test_blocks_of_nvfp4_in_each_rank(self) -> None:
        """Input of mlp.proj: 96 is 16 on each of 6 ranks; 80 is 40 on each of two, no multiple of 16."""
        model = shape(hidden_size=96, intermediate_size=96, num_attention_heads=6, num_key_value_heads=6, head_dim=16)
        check_shapes(model, Scheme("nvfp4"), 1)
        check_shapes(model, Scheme("nvfp4"), 3)
        check_shapes(model, Scheme("nvfp4"), 6)
        error = refusal(replace(model, intermediate_size=80), Scheme("nvfp4"), 2)
        assert "intermediate_size 80" in error.what
        assert "32" in (error.why or "")
        assert "parallel.tensor to one of: 1" in (error.next or "")

    def test_a_source_that_has_the_format_is_offered_no_other(self) -> None:
        model = shape(hidden_size=512, intermediate_size=1536, num_attention_heads=8, num_key_value_heads=8)
        with pytest.raises(SourceError) as refusal:
            check_shapes(model, Scheme("int4_rtn", group_size=128), 8, loaders=("vllm",))
        assert refusal.value.next == (
            "set parallel.tensor to one of: 1, 2, 4, or build for backend vllm, "
            "or give the original, unquantized model as model.source"
        )

    @pytest.mark.parametrize("name", ["fp8", "int8_sq"])
    def test_no_rule(self, name: str) -> None:
        check_shapes(shape(hidden_size=66, num_attention_heads=1, num_key_value_heads=1, head_dim=66), Scheme(name), 1)

    @pytest.mark.parametrize("name", ["int8_sq", "fp8_pc_pt", "w4a8_awq", "nvfp4"])
    def test_formats_without_experts(self, name: str) -> None:
        model = family_for(MIXTRAL).model_shape(MIXTRAL)
        error = refusal(model, Scheme(name))
        assert "is an expert" in error.what
        assert error.next == "set quantization.format to one of: none, int8_wo, int4_wo, int4_rtn, int4_awq, fp8"
        # Attention alone can have it; experts are refused by the writer's rules for mixtures where they differ.
        check_shapes(model, Scheme(overrides={"*self_attn*": name}), 1)

    def test_row_wise_fp8_needs_rms_norm(self) -> None:
        error = refusal(family_for(GPT2).model_shape(GPT2), Scheme("fp8_pc_pt"))
        assert "LayerNorm" in error.what
        assert error.next == "set quantization.format to fp8"

    def test_layers_that_stay_plain_have_no_rule(self) -> None:
        model = shape(hidden_size=128, intermediate_size=192, num_attention_heads=2, num_key_value_heads=2)
        check_shapes(model, Scheme("int4_awq", group_size=128, exclude=("*mlp*",)), 1)
        error = refusal(model, Scheme("none", overrides={"*down_proj": "int4_rtn"}))
        assert "intermediate_size 192 does not fit int4_rtn" in error.what


class TestWeightOnly:
    def test_int8_by_hand(self) -> None:
        """Largest 128 → scale 1; 0.5 and 2.5 go away from zero; +128 does not fit and becomes 127."""
        weight = np.array([[128.0, 0.5, -0.5, 2.5, -2.5, 0.49999997, 1.4]], np.float32)
        quantized, scale = quantize(weight, 8)
        assert quantized.tolist() == [[127, 1, -1, 3, -3, 0, 1]]
        assert scale.tolist() == [1.0]
        assert quantize(-weight, 8)[0].tolist() == [[-128, -1, 1, -3, 3, 0, -1]]

    def test_int4_by_hand(self) -> None:
        """Largest 8 → scale 1; the range is -8..7."""
        quantized, scale = quantize(np.array([[8.0, -8.0, 7.5, -7.5, 3.2]], np.float32), 4)
        assert quantized.tolist() == [[7, -8, 7, -8, 3]]
        assert scale.tolist() == [1.0]

    def test_a_row_of_zeros(self) -> None:
        quantized, scale = quantize(np.zeros((2, 3), np.float16), 8)
        assert not quantized.any()
        assert scale.tolist() == [0.0, 0.0]

    def test_rows_are_output_channels(self) -> None:
        _, scale = quantize(np.array([[1.0, -64.0], [2.0, 0.5]], np.float16), 8)
        assert scale.tolist() == [0.5, 2 / 128]

    def test_the_stored_scale_is_rounded_to_the_dtype(self) -> None:
        """amax = 2^-10 + 2^-20 in float16; amax / 128 = 2^-17 + 2^-27 lies between float16's subnormals 2^-24 apart."""
        amax = 2.0**-10 + 2.0**-20
        weight = np.array([[amax]])
        assert quantize(weight.astype(np.float16), 8)[1].tolist() == [2.0**-17]
        assert quantize(weight.astype(np.float32), 8)[1].tolist() == [amax / 128]

    @pytest.mark.parametrize("bits", [4, 8])
    @pytest.mark.parametrize("dtype", list(DTYPES))
    def test_against_c_arithmetic_in_plain_python(self, dtype: str, bits: int) -> None:
        """The builder's loop element by element: float32 amax · 2^-(bits-1), float32 division, C's round, clamp."""
        weight = np.random.default_rng(0).standard_normal((5, 64)).astype(np.float32).astype(DTYPES[dtype])
        quantized, scale = quantize(weight, bits)
        limit = 2 ** (bits - 1)
        for row, got, got_scale in zip(weight, quantized, scale):
            column = [np.float32(value) for value in row]
            exact = np.float32(max(abs(value) for value in column)) * np.float32(1 / limit)
            assert got_scale == np.float32(exact.astype(DTYPES[dtype]))
            for value, number in zip(column, got):
                ratio = float(value / exact)
                rounded = math.copysign(math.floor(abs(ratio) + 0.5), ratio)
                assert number == max(-limit, min(limit - 1, int(rounded)))

    def test_many_rows_are_the_same_as_one_by_one(self) -> None:
        weight = np.random.default_rng(1).standard_normal((3000, 700)).astype(np.float16)
        quantized, scale = quantize(weight, 8)
        for row in (0, 1497, 1498, 2999):
            alone, alone_scale = quantize(weight[row : row + 1], 8)
            assert (quantized[row] == alone[0]).all()
            assert scale[row] == alone_scale[0]

    @pytest.mark.parametrize("bits", [4, 8])
    def test_error_is_at_most_one_step(self, bits: int) -> None:
        """Half a step by rounding; a whole one where the largest value is clamped."""
        weight = np.random.default_rng(2).standard_normal((16, 256)).astype(np.float32)
        quantized, scale = quantize(weight, bits)
        steps = np.abs(quantized * scale[:, None] - weight) / scale[:, None]
        clamped = quantized == 2 ** (bits - 1) - 1
        assert steps.max() <= 1 + 1e-4
        assert steps[~clamped].max() <= 0.5 + 1e-4

    def test_other_widths_are_a_programming_error(self) -> None:
        with pytest.raises(ValueError, match="bits is 3"):
            quantize(np.ones((1, 1), np.float32), 3)


class TestScheme:
    def test_names_and_patterns_decide_in_their_order(self) -> None:
        scheme = Scheme(
            "fp8",
            exclude=("a.b", "x.[0-9].*"),
            overrides={"a.c": "int8_wo", "a.*": "none", "a.d": "nvfp4", "*.e?": "int4_rtn"},
        )
        decided = {"a.b": "none", "x.3.q": "none", "a.c": "int8_wo", "a.d": "none", "y.e1": "int4_rtn", "y.e": "fp8"}
        for _ in range(2):  # the second time from memory
            assert {name: scheme.format_of(name) for name in decided} == decided
        assert scheme == Scheme.from_dict(scheme.as_dict())

    def test_many_patterns_over_many_modules_take_no_time(self) -> None:
        """Qwen3-30B-A3B: 48 layers of 128 experts of 3 linears; an exclusion for each layer took 2 s."""
        names = [f"model.layers.{i}.mlp.experts.{e}.{p}_proj" for i in range(48) for e in range(128) for p in "abc"]
        scheme = Scheme("fp8", exclude=tuple(f"model.layers.{layer}.self_attn.*" for layer in range(48)))
        begin = time.process_time()
        for _ in range(4):
            assert {scheme.format_of(name) for name in names} == {"fp8"}
        assert time.process_time() - begin < 0.6
