"""Which kinds of attention OpenVINO GenAI executes exactly: the table of docs/attention-features.md.

    python benchmarks/attention_features.py

For each kind a random decoder (4 layers, 8 heads, 4 KV heads, head size 16, float32) gets a prompt of 40 tokens and
continues it greedily for 24. The reference is the same graph run statefully in one piece, token for token, in float32
(that graph equals transformers within 1e-5 for the kinds that the four families use: tests/parity/test_engine_*.py).
A kind counts as exact when all 24 tokens agree and the log-probability of the first differs by less than 1e-4; the
prompt is five windows long, so an ignored window shows in the first token.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

# lpxbuild first: it switches OpenVINO's telemetry off.
# isort: off
from lpxbuild.engine.openvino.graph import GraphBuilder
from lpxbuild.engine.openvino.rope import frequencies
from lpxbuild.engine.openvino.weights import MergedWeights

import numpy as np
import openvino as ov
import openvino_genai as genai
from openvino import Type
from openvino import opset13 as op
# isort: on

LAYERS, HEADS, KV_HEADS, HEAD, HIDDEN, INNER, VOCABULARY = 4, 8, 4, 16, 128, 192, 256
WINDOW, PROMPT, ANSWER = 8, 40, 24
EXACT: dict[str, Any] = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
}


class RandomRanks:
    """A one-rank checkpoint in memory."""

    def __init__(self, window: int | None, layer_types: list[str] | None) -> None:
        random = np.random.default_rng(5)
        sizes = {"vocab_size": VOCABULARY, "hidden_size": HIDDEN, "num_hidden_layers": LAYERS}
        heads = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_size": HEAD}
        rotary = {"rotary_base": 10000.0, "rotary_scaling": None, "max_position_embeddings": 128}
        self.config: dict[str, Any] = {**sizes, **heads, **rotary, "hidden_act": "silu", "norm_epsilon": 1e-5}
        self.config["mapping"] = {"tp_size": 1, "pp_size": 1}
        self.config["lpx"] = {"sliding_window": window, "layer_types": layer_types}
        shapes = {"transformer.vocab_embedding.weight": (VOCABULARY, HIDDEN), "lm_head.weight": (VOCABULARY, HIDDEN)}
        for layer in range(LAYERS):
            prefix = f"transformer.layers.{layer}."
            shapes[prefix + "attention.qkv.weight"] = ((HEADS + 2 * KV_HEADS) * HEAD, HIDDEN)
            shapes[prefix + "attention.dense.weight"] = (HIDDEN, HEADS * HEAD)
            shapes[prefix + "mlp.fc.weight"] = shapes[prefix + "mlp.gate.weight"] = (INNER, HIDDEN)
            shapes[prefix + "mlp.proj.weight"] = (HIDDEN, INNER)
        self._tensors = {name: random.normal(0, 0.15, shape).astype(np.float32) for name, shape in shapes.items()}
        for layer in range(LAYERS):
            for norm in ("input_layernorm", "post_layernorm"):
                self._tensors[f"transformer.layers.{layer}.{norm}.weight"] = np.ones(HIDDEN, np.float32)
        self._tensors["transformer.ln_f.weight"] = np.ones(HIDDEN, np.float32)

    def tensor(self, name: str, rank: int) -> Any:
        return self._tensors[name]

    def names(self, rank: int) -> frozenset[str]:
        return frozenset(self._tensors)


class OtherWindowForm(GraphBuilder):
    """The same window, written as Select over LogicalAnd: what one would write without knowing the transformation."""

    def mask(self, window: int | None) -> Any:
        query, key, present = self._positions()
        seen = op.logical_and(op.less_equal(key, query), present)
        if window is not None:
            seen = op.logical_and(seen, op.greater(key, op.subtract(query, constant(window))))
        return op.select(seen, constant(0.0), constant(-3.4e38))

    def _positions(self) -> tuple[Any, Any, Any]:
        tokens = op.gather(op.shape_of(self.input_ids), constant(1), constant(0))
        total = op.gather(op.shape_of(self.attention_mask), constant(1), constant(0))
        query = op.unsqueeze(op.range(op.subtract(total, tokens), total, constant(1), Type.i64), constant([0, 1, 3]))
        key = op.unsqueeze(op.range(constant(0), total, constant(1), Type.i64), constant([0, 1, 2]))
        present = op.not_equal(op.unsqueeze(self.attention_mask, constant([1, 2])), constant(0))
        return query, key, present


class SoftCap(OtherWindowForm):
    """Gemma 2: scores pass through 5·tanh(score / 5) before the softmax."""

    def attend(self, layer: int, query: Any, key: Any, value: Any) -> Any:
        scores = op.multiply(op.matmul(query, key, False, True), constant(self.head_size**-0.5))
        scores = op.multiply(op.tanh(op.divide(scores, constant(5.0))), constant(5.0))
        return op.matmul(op.softmax(op.add(scores, self.mask(None)), -1), value, False, False)


class Alibi(OtherWindowForm):
    """BLOOM: no RoPE, a bias slope · key position in the mask, in the form that BLOOM's export has."""

    def rotate(self, layer: int, value: Any) -> Any:
        return value

    def attend(self, layer: int, query: Any, key: Any, value: Any) -> Any:
        rows, columns, present = self._positions()
        slopes = np.array([2.0 ** -(head + 1) for head in range(self.heads)], np.float32).reshape(1, self.heads, 1)
        positions = op.convert(op.squeeze(columns, constant([0, 1])), Type.f32)
        total = op.gather(op.shape_of(self.attention_mask), constant([1]), constant(0))
        bias = op.multiply(op.unsqueeze(positions, constant(0)), op.constant(slopes))
        flat = op.reshape(bias, op.concat([constant([self.heads, 1]), total], 0), False)
        bias = op.reshape(flat, op.concat([constant([1, self.heads, 1]), total], 0), False)
        hidden = op.logical_not(op.logical_and(op.less_equal(columns, rows), present))
        mask = op.select(hidden, constant(-3.4e38), bias)
        return op.scaled_dot_product_attention(query, key, value, mask, constant(self.head_size**-0.5), causal=False)


class TwoRotaryBases(GraphBuilder):
    """Gemma 3: every other layer has its own RoPE base."""

    def rotate(self, layer: int, value: Any) -> Any:
        if layer % 2 == 0:
            return super().rotate(layer, value)
        inverse, _ = frequencies(self.head_size, 100.0, None, 128)
        positions = op.convert(op.unsqueeze(self.position_ids, constant(2)), Type.f32)
        angles = op.matmul(positions, op.constant(inverse.reshape(1, 1, -1)), False, False)
        angles = op.unsqueeze(op.concat([angles, angles], 2), constant(1))
        kept = self.cos, self.sin
        self.cos, self.sin = op.cos(angles), op.sin(angles)
        rotated = super().rotate(layer, value)
        self.cos, self.sin = kept
        return rotated


def constant(value: Any) -> Any:
    array = np.array(value)
    return op.constant(array.astype(np.int64 if array.dtype.kind == "i" else np.float32))


ALTERNATING = ["sliding_attention", "full_attention"] * (LAYERS // 2)
KINDS: list[tuple[str, type[GraphBuilder], int | None, list[str] | None]] = [
    ("plain causal", GraphBuilder, None, None),
    ("sliding window, BitwiseAnd chain (lpx)", GraphBuilder, WINDOW, None),
    ("sliding window, Select over LogicalAnd", OtherWindowForm, WINDOW, None),
    ("alternating windows, BitwiseAnd chain (lpx)", GraphBuilder, WINDOW, ALTERNATING),
    ("soft-cap on the scores", SoftCap, None, None),
    ("ALiBi, BLOOM's form", Alibi, None, None),
    ("two RoPE bases", TwoRotaryBases, None, None),
]


def stateful_greedy(model: Any, prompt: list[int]) -> tuple[list[int], float]:
    request = ov.Core().compile_model(model, "CPU", EXACT).create_infer_request()
    ids, past, answer, first = prompt, 0, [], 0.0
    while len(answer) < ANSWER:
        end = past + len(ids)
        request.infer(
            {
                "input_ids": np.array([ids], np.int64),
                "attention_mask": np.ones((1, end), np.int64),
                "position_ids": np.arange(past, end, dtype=np.int64)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
        )
        logits = request.get_tensor("logits").data[0, -1].astype(np.float64)
        token = int(logits.argmax())
        if not answer:
            first = float(logits[token] - logits.max() - np.log(np.exp(logits - logits.max()).sum()))
        past, ids = end, [token]
        answer.append(token)
    return answer, first


def configuration() -> genai.GenerationConfig:
    config = genai.GenerationConfig()
    config.max_new_tokens, config.ignore_eos, config.do_sample, config.logprobs = ANSWER, True, False, 1
    config.apply_chat_template = False
    return config


def paged(folder: Path, prompt: list[int]) -> tuple[list[int], float | None]:
    scheduler = genai.SchedulerConfig()
    scheduler.cache_size, scheduler.num_kv_blocks, scheduler.max_num_batched_tokens = 0, 64, 16
    pipeline = genai.ContinuousBatchingPipeline(str(folder), scheduler, "CPU", EXACT)
    handle = pipeline.add_request(0, ov.Tensor(np.array([prompt], np.int64)), configuration())
    ids: list[int] = []
    scores: list[float] = []
    while pipeline.has_non_finished_requests():
        pipeline.step()
        while handle.can_read():
            for output in handle.read().values():
                ids += output.generated_ids
                scores += output.generated_log_probs
    return ids, scores[0]


def static(folder: Path, prompt: list[int]) -> tuple[list[int], float | None]:
    pipeline = genai.LLMPipeline(str(folder), "CPU", ATTENTION_BACKEND="SDPA", **EXACT)
    inputs = genai.TokenizedInputs(
        ov.Tensor(np.array([prompt], np.int64)), ov.Tensor(np.ones((1, len(prompt)), np.int64))
    )
    config = configuration()
    config.logprobs = 0
    return list(pipeline.generate(inputs, config).tokens[0]), None


def verdict(execute: Any, folder: Path, prompt: list[int], expected: tuple[list[int], float]) -> str:
    try:
        ids, score = execute(folder, prompt)
    except RuntimeError as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        return f"refused: {lines[-1].strip()[:90]}"
    equal = sum(left == right for left, right in zip(ids, expected[0]))
    difference = "" if score is None else f", log-probability off by {abs(score - expected[1]):.0e}"
    exact = equal == ANSWER and (score is None or abs(score - expected[1]) < 1e-4)
    return f"{'exact' if exact else 'WRONG'} ({equal} of {ANSWER}{difference})"


def main() -> None:
    prompt = np.random.default_rng(7).integers(3, VOCABULARY, PROMPT).tolist()
    print(f"openvino {ov.__version__}, openvino_genai {genai.__version__}\n")
    print("| attention | ContinuousBatchingPipeline (paged) | LLMPipeline, ATTENTION_BACKEND=SDPA (static batches) |")
    print("|---|---|---|")
    for name, builder_class, window, layer_types in KINDS:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            ranks = RandomRanks(window, layer_types)
            builder = builder_class(ranks.config, MergedWeights(ranks, folder), "checkpoint")
            model = builder.model()
            expected = stateful_greedy(model, prompt)
            ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
            (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
            results = [verdict(execute, folder, prompt, expected) for execute in (paged, static)]
        print(f"| {name} | {' | '.join(results)} |")


if __name__ == "__main__":
    main()
