"""Mixtures of experts: which layers have them, every tensor of every rank by arithmetic, TensorRT-LLM's fields."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import numpy as np
import pytest

from lpxbuild.checkpoint.config import shape_from_config, trtllm_config
from lpxbuild.checkpoint.layout import plan
from lpxbuild.checkpoint.quantized_config import linear_formats, quantization_fields
from lpxbuild.errors import SourceError
from lpxbuild.families import ModelShape, check_parallel, families, family_for, tensor_parallel_sizes
from lpxbuild.quantization.scheme import Scheme

HIDDEN, HEADS, KV_HEADS, HEAD, LAYERS, EXPERTS, INNER, SHARED, DENSE = 32, 4, 2, 8, 3, 4, 16, 24, 64
MIXTRAL = {"architectures": ["MixtralForCausalLM"], "model_type": "mixtral", "num_local_experts": EXPERTS}
QWEN = {"moe_intermediate_size": INNER, "num_experts": EXPERTS}
QWEN2 = {
    "architectures": ["Qwen2MoeForCausalLM"],
    "model_type": "qwen2_moe",
    "shared_expert_intermediate_size": SHARED,
    **QWEN,
}
QWEN3 = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "head_dim": HEAD, **QWEN}
CONFIGS: dict[str, dict[str, Any]] = {"mixtral": MIXTRAL, "qwen2_moe": QWEN2, "qwen3_moe": QWEN3}


def shape(family: str, **changes: Any) -> ModelShape:
    config = {
        "hidden_size": HIDDEN,
        "intermediate_size": INNER if family == "mixtral" else DENSE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": 50,
        "num_experts_per_tok": 2,
        "torch_dtype": "bfloat16",
        **CONFIGS[family],
        **changes,
    }
    config = {key: value for key, value in config.items() if value != "absent"}
    return family_for(config).model_shape(config)


class TestConfigs:
    def test_mixtral_always_divides_by_the_sum(self) -> None:
        found = shape("mixtral").moe
        assert found is not None
        assert (found.num_experts, found.top_k, found.intermediate_size) == (EXPERTS, 2, INNER)
        assert found.renormalize
        assert (found.shared_intermediate_size, found.dense_layers) == (0, ())

    def test_silent_keys_are_those_of_transformers(self) -> None:
        # The defaults of transformers 4.57's config classes.
        mixtral = shape("mixtral", num_local_experts="absent", num_experts_per_tok="absent")
        assert mixtral.moe is not None
        assert (mixtral.moe.num_experts, mixtral.moe.top_k) == (8, 2)
        assert (mixtral.rotary_base, mixtral.norm_epsilon, mixtral.sliding_window) == (1e6, 1e-5, None)
        keys = ("num_experts", "num_experts_per_tok", "moe_intermediate_size", "shared_expert_intermediate_size")
        absent = dict.fromkeys(keys, "absent")
        qwen2, qwen3 = shape("qwen2_moe", **absent), shape("qwen3_moe", **absent)
        assert qwen2.moe is not None
        assert qwen3.moe is not None
        assert (qwen2.moe.num_experts, qwen2.moe.top_k, qwen2.moe.intermediate_size) == (60, 4, 1408)
        assert (qwen2.moe.shared_intermediate_size, qwen2.moe.renormalize) == (5632, False)
        assert (qwen3.moe.num_experts, qwen3.moe.top_k, qwen3.moe.intermediate_size) == (128, 8, 768)
        assert (qwen3.moe.shared_intermediate_size, qwen3.moe.renormalize) == (0, False)

    def test_qwen_divides_by_the_sum_only_where_its_config_says_so(self) -> None:
        found = shape("qwen3_moe", norm_topk_prob=True).moe
        assert found is not None
        assert found.renormalize

    @pytest.mark.parametrize(
        ("keys", "dense"),
        [
            ({}, ()),
            ({"mlp_only_layers": [1]}, (1,)),
            ({"decoder_sparse_step": 2}, (0, 2)),
            ({"decoder_sparse_step": 2, "mlp_only_layers": [0]}, (0, 2)),
            ({"mlp_only_layers": None}, ()),
        ],
    )
    def test_layers_without_experts(self, keys: dict[str, Any], dense: tuple[int, ...]) -> None:
        # transformers: experts where the layer is not named and (layer + 1) % step == 0.
        for family in ("qwen2_moe", "qwen3_moe"):
            found = shape(family, **keys).moe
            assert found is not None
            assert found.dense_layers == dense

    def test_a_window_holds_in_every_layer(self) -> None:
        assert shape("qwen3_moe", sliding_window=8).sliding_window is None
        found = shape("qwen3_moe", sliding_window=8, use_sliding_window=True, max_window_layers=2)
        assert (found.sliding_window, found.layer_types) == (8, None)

    def test_biases(self) -> None:
        assert shape("qwen2_moe").qkv_bias
        assert not shape("qwen2_moe", qkv_bias=False).qkv_bias
        assert not shape("qwen3_moe").qkv_bias
        with pytest.raises(SourceError, match="attention_bias"):
            shape("qwen3_moe", attention_bias=True)

    @pytest.mark.parametrize(
        ("family", "keys", "words"),
        [
            ("mixtral", {"num_local_experts": 1}, ["num_local_experts is 1", "two experts"]),
            ("mixtral", {"num_experts_per_tok": 5}, ["num_experts_per_tok 5"]),
            ("mixtral", {"num_local_experts": "four"}, ["num_local_experts is 'four'"]),
            ("qwen2_moe", {"mlp_only_layers": "0"}, ["mlp_only_layers is '0'"]),
            ("qwen3_moe", {"mlp_only_layers": [0, 1, 2]}, ["no layer with experts"]),
            ("qwen3_moe", {"decoder_sparse_step": 0}, ["decoder_sparse_step is 0"]),
        ],
    )
    def test_refused(self, family: str, keys: dict[str, Any], words: list[str]) -> None:
        with pytest.raises(SourceError) as refusal:
            shape(family, **keys)
        assert [word for word in words if word not in str(refusal.value)] == []


class TestSplits:
    def test_every_inner_size_has_to_divide(self) -> None:
        # 4 heads; 16, 24 and 64 columns: 1, 2 and 4 ranks divide them all. 12 is no multiple of 8.
        assert tensor_parallel_sizes(shape("qwen2_moe", num_attention_heads=8, num_key_value_heads=8)) == (1, 2, 4, 8)
        odd = shape("qwen2_moe", num_attention_heads=8, num_key_value_heads=8, shared_expert_intermediate_size=12)
        assert tensor_parallel_sizes(odd) == (1, 2, 4)
        with pytest.raises(SourceError, match="shared_expert_intermediate_size 12 cannot be split over"):
            check_parallel(odd, 8, 1)
        odd = shape("qwen3_moe", moe_intermediate_size=18)
        with pytest.raises(SourceError) as refusal:
            check_parallel(odd, 4, 1)
        assert "moe_intermediate_size 18" in str(refusal.value)
        assert refusal.value.next == "set parallel.tensor to one of: 1, 2"


def hugging_face(model: ModelShape) -> dict[str, np.ndarray]:
    random = np.random.default_rng(5)
    expected = families()[model.family].tensors(model)
    return {name: random.standard_normal(spec.shape, dtype=np.float32) for name, spec in expected.items()}


def written(model: ModelShape, source: dict[str, np.ndarray], tensor: int, pipeline: int) -> dict[int, dict[str, Any]]:
    """The rank files that the plan describes, put together piece by piece."""
    ranks: dict[int, dict[str, Any]] = {rank: {} for rank in range(tensor * pipeline)}
    for item in plan(model, tensor, pipeline):
        flat = np.zeros(
            (int(np.prod(item.shape[:-1])) if len(item.shape) > 1 else item.shape[0],)
            + (item.shape[-1:] if len(item.shape) > 1 else (1,)),
            np.float32,
        )
        for piece in item.pieces:
            whole = source[piece.source]
            matrix = whole.reshape(whole.shape[0], -1)
            rows = matrix[slice(*piece.rows), slice(*piece.columns)]
            flat[piece.at : piece.at + len(rows)] = rows
        ranks[item.rank][item.name] = flat.reshape(item.shape)
    return ranks


def stacked(source: dict[str, np.ndarray], name: str) -> np.ndarray:
    return np.stack([source[name.format(expert)] for expert in range(EXPERTS)])


@pytest.mark.parametrize("tensor", [1, 2, 4])
def test_mixtral_tensors_by_arithmetic(tensor: int) -> None:
    """Per rank: fc = [w3; w1] cut in columns of each expert, proj = w2 cut in its inner size, the router whole."""
    model = shape("mixtral")
    source = hugging_face(model)
    ranks = written(model, source, tensor, 1)
    for layer in range(LAYERS):
        expert = f"model.layers.{layer}.block_sparse_moe.experts.{{}}"
        w1, w2, w3 = (stacked(source, f"{expert}.{name}.weight") for name in ("w1", "w2", "w3"))
        for rank in range(tensor):
            part = slice(rank * INNER // tensor, (rank + 1) * INNER // tensor)
            found = ranks[rank]
            mlp = f"transformer.layers.{layer}.mlp."
            np.testing.assert_array_equal(found[f"{mlp}fc.weight"], np.concatenate([w3[:, part], w1[:, part]], 1))
            np.testing.assert_array_equal(found[f"{mlp}proj.weight"], w2[:, :, part])
            router = source[f"model.layers.{layer}.block_sparse_moe.gate.weight"]
            np.testing.assert_array_equal(found[f"{mlp}router.weight"], router)
            assert f"{mlp}gate.weight" not in found


@pytest.mark.parametrize(("tensor", "pipeline"), [(1, 1), (2, 1), (2, 3)])
@pytest.mark.parametrize("family", ["qwen2_moe", "qwen3_moe"])
def test_qwen_tensors_by_arithmetic(family: str, tensor: int, pipeline: int) -> None:
    """Layer 1 is dense and has the usual three tensors; the others have experts, in qwen2_moe a shared one too."""
    model = shape(family, mlp_only_layers=[1])
    source = hugging_face(model)
    ranks = written(model, source, tensor, pipeline)
    for layer in range(LAYERS):
        stage, local = divmod(layer, LAYERS // pipeline)
        hf, mlp = f"model.layers.{layer}.mlp.", f"transformer.layers.{local}.mlp."

        def cut(size: int, rank: int) -> slice:
            return slice(rank * size // tensor, (rank + 1) * size // tensor)

        for rank in range(tensor):
            found = {
                name.removeprefix(mlp): value
                for name, value in ranks[stage * tensor + rank].items()
                if name.startswith(mlp)
            }
            if layer == 1:
                part = cut(DENSE, rank)
                wanted = {
                    "fc.weight": source[f"{hf}gate_proj.weight"][part],
                    "gate.weight": source[f"{hf}up_proj.weight"][part],
                    "proj.weight": source[f"{hf}down_proj.weight"][:, part],
                }
            else:
                part = cut(INNER, rank)
                gate, up, down = (
                    stacked(source, f"{hf}experts.{{}}.{name}_proj.weight") for name in ("gate", "up", "down")
                )
                wanted = {
                    "router.weight": source[f"{hf}gate.weight"],
                    "fc.weight": np.concatenate([up[:, part], gate[:, part]], 1),
                    "proj.weight": down[:, :, part],
                }
                if family == "qwen2_moe":
                    part, shared = cut(SHARED, rank), f"{hf}shared_expert"
                    wanted |= {
                        "shared_expert.fc.weight": np.concatenate(
                            [source[f"{shared}.up_proj.weight"][part], source[f"{shared}.gate_proj.weight"][part]]
                        ),
                        "shared_expert.proj.weight": source[f"{shared}.down_proj.weight"][:, part],
                        "shared_expert_gate.weight": source[f"{shared}_gate.weight"],
                    }
            assert set(found) == set(wanted)
            for name, value in wanted.items():
                np.testing.assert_array_equal(found[name], value, err_msg=f"layer {layer} rank {rank} {name}")


@pytest.mark.parametrize("family", CONFIGS)
def test_types_and_linears(family: str) -> None:
    """Routers are float32 and no linear; what a format may change is the experts and the shared expert."""
    model = shape(family)
    for item in plan(model, 2, 1):
        module = item.name.removesuffix(".weight")
        assert item.dtype == ("F32" if module.endswith("router") else None), item.name
        linear = module.endswith(("qkv", "dense", "fc", "proj")) and item.name.endswith(".weight")
        assert (item.linear is not None) == linear, item.name
    fc = next(item.linear for item in plan(model, 2, 1) if item.name.endswith("layers.0.mlp.fc.weight"))
    assert fc is not None
    assert [(part.role, part.expert) for part in fc.parts][:3] == [("up", 0), ("gate", 0), ("up", 1)]
    assert {part.shape for part in fc.parts} == {(INNER, HIDDEN)}


class TestTrtllmConfig:
    def config(self, model: ModelShape, tensor: int = 2) -> dict[str, Any]:
        return trtllm_config(
            model,
            dtype="bfloat16",
            scheme=Scheme(),
            quantization={},
            tensor_parallel=tensor,
            pipeline_parallel=1,
            generation={"end_ids": [2]},
        )

    def test_mixtral(self) -> None:
        found = self.config(shape("mixtral"))
        assert found["hidden_act"] == "swiglu"
        assert found["intermediate_size"] == INNER
        assert found["moe"] == {"num_experts": EXPERTS, "top_k": 2, "normalization_mode": 1}
        assert found["mapping"]["moe_tp_size"] == 2
        assert found["mapping"]["moe_ep_size"] == 1

    def test_qwen(self) -> None:
        found = self.config(shape("qwen2_moe", decoder_sparse_step=2))
        assert found["qwen_type"] == "qwen2_moe"
        assert found["hidden_act"] == "swiglu"
        assert found["attn_bias"] is True
        assert (found["moe_intermediate_size"], found["moe_shared_expert_intermediate_size"]) == (INNER, SHARED)
        # The layers of HF's two keys in one: with a step of 1 only the named ones are dense.
        assert (found["mlp_only_layers"], found["decoder_sparse_step"]) == ([0, 2], 1)
        assert found["moe"]["normalization_mode"] == 0
        found = self.config(shape("qwen3_moe", norm_topk_prob=True))
        assert found["moe"]["normalization_mode"] == 1
        assert (found["qwen_type"], found["attn_bias"]) == ("qwen3_moe", False)

    @pytest.mark.parametrize("family", CONFIGS)
    def test_the_way_back(self, family: str) -> None:
        model = shape(family) if family == "mixtral" else shape(family, mlp_only_layers=[0], norm_topk_prob=True)
        assert shape_from_config(self.config(model)) == model


@pytest.mark.parametrize("exclude", [(), ("model.layers.0.self_attn.*",)])
def test_weight_only_leaves_the_gate_of_the_shared_expert_alone(exclude: tuple[str, ...]) -> None:
    """TensorRT-LLM's builder quantizes what has one of five ends in its name and fits no pattern; where
    exclude_modules is null, *shared_expert_gate.weight is its only pattern (models/convert_utils.py)."""
    scheme = Scheme("int8_wo", exclude=exclude)
    tensors = list(plan(shape("qwen2_moe"), 2, 1))
    patterns = quantization_fields(linear_formats(tensors, scheme), scheme)["exclude_modules"]
    ends = ("qkv.weight", "dense.weight", "fc.weight", "proj.weight", "gate.weight")
    quantized = {
        item.name
        for item in tensors
        if any(end in item.name for end in ends)
        and not any(fnmatchcase(item.name, pattern) for pattern in patterns or ["*shared_expert_gate.weight"])
    }
    linears = {item.name for item in tensors if item.linear is not None}
    left = {name for name in linears if exclude and name.startswith("transformer.layers.0.attention.")}
    assert quantized == linears - left
