"""Which kinds of attention OpenVINO GenAI executes exactly: the table of docs/attention-features.md.

    python benchmarks/attention_features.py

For each kind a random decoder (4 layers, 8 heads, 4 KV heads, head size 16, float32) gets a prompt of 40 tokens and
continues it greedily for 24. The reference is the same graph run statefully in one piece, token for token, in float32
(that graph equals transformers within 2e-5 for every family: tests/parity/test_engine_families.py).
A kind counts as exact when all 24 tokens agree and the log-probability of the first differs by less than 1e-4; the
prompt is five windows long, so an ignored window shows in the first token.
"""

from __future__ import annotations

import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

# lpxbuild first: it switches OpenVINO's telemetry off.
# isort: off
from lpxbuild.engine.openvino.graph import DecoderGraph
from lpxbuild.engine.openvino.masks import Masks
from lpxbuild.engine.openvino.nodes import integer, number
from lpxbuild.engine.openvino.weights import MergedWeights
from lpxbuild.families.shape import ModelShape

import numpy as np
import openvino as ov
import openvino_genai as genai
from openvino import opset13 as op
# isort: on

LAYERS, HEADS, KV_HEADS, HEAD, HIDDEN, INNER, VOCABULARY = 4, 8, 4, 16, 128, 192, 256
WINDOW, PROMPT, ANSWER = 8, 40, 24
EXACT: dict[str, Any] = {
    "INFERENCE_PRECISION_HINT": "f32",
    "KV_CACHE_PRECISION": "f32",
    "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
}
PLAIN = ModelShape(
    family="llama",
    architecture="LlamaForCausalLM",
    hidden_size=HIDDEN,
    intermediate_size=INNER,
    num_hidden_layers=LAYERS,
    num_attention_heads=HEADS,
    num_key_value_heads=KV_HEADS,
    head_size=HEAD,
    vocab_size=VOCABULARY,
    max_position_embeddings=128,
    norm_epsilon=1e-5,
    hidden_act="silu",
    rotary_base=10000.0,
    rotary_scaling=None,
    tie_word_embeddings=False,
    dtype="float32",
)


class RandomRanks:
    """A one-rank checkpoint in memory."""

    def __init__(self, shape: ModelShape) -> None:
        random = np.random.default_rng(5)
        self.shape = shape
        self.config = {"mapping": {"tp_size": 1, "pp_size": 1}}
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
        shape_of_positions = (shape.max_position_embeddings, HIDDEN)
        self._tensors["transformer.position_embedding.weight"] = random.normal(0, 0.3, shape_of_positions).astype("f4")

    def tensor(self, name: str, rank: int) -> Any:
        return self._tensors[name]

    def names(self, rank: int) -> frozenset[str]:
        return frozenset(self._tensors)

    def format_of(self, name: str) -> str:
        return "none"

    def weight_rows(self, name: str, rank: int, begin: int, end: int) -> Any:
        return self._tensors[name][begin:end]


class OtherWindowForm(Masks):
    """The same window, written as Select over LogicalAnd: what one would write without knowing the transformation."""

    def make(self, window: int | None) -> Any:
        query, key, present = self.positions()
        seen = op.logical_and(op.less_equal(key, query), present)
        if window is not None:
            seen = op.logical_and(seen, op.greater(key, op.subtract(query, integer(window))))
        return op.select(seen, number(0.0), number(-3.4e38))


ALTERNATING = ("sliding_attention", "full_attention") * (LAYERS // 2)
KINDS: list[tuple[str, dict[str, Any], type[Masks]]] = [
    ("plain causal", {}, Masks),
    ("another scale (Gemma 2, Granite)", {"attention_scale": 0.1}, Masks),
    ("partial rotation (Phi-3)", {"rotary_pct": 0.5}, Masks),
    ("learned positions (GPT-2)", {"position": "learned"}, Masks),
    ("sliding window, BitwiseAnd chain (lpx)", {"sliding_window": WINDOW}, Masks),
    ("sliding window, Select over LogicalAnd", {"sliding_window": WINDOW}, OtherWindowForm),
    ("alternating windows, BitwiseAnd chain (lpx)", {"sliding_window": WINDOW, "layer_types": ALTERNATING}, Masks),
    (
        "alternating windows with two RoPE bases (Gemma 3)",
        {"sliding_window": WINDOW, "layer_types": ALTERNATING, "rotary_local_base": 100.0},
        Masks,
    ),
    ("soft-cap on the scores (Gemma 2)", {"attn_softcap": 5.0}, Masks),
    (
        "soft-cap with alternating windows (Gemma 2)",
        {"attn_softcap": 5.0, "sliding_window": WINDOW, "layer_types": ALTERNATING},
        Masks,
    ),
    ("ALiBi (Falcon)", {"position": "alibi"}, Masks),
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
    for name, fields, masks in KINDS:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(scratch)
            graph = DecoderGraph(MergedWeights(RandomRanks(replace(PLAIN, **fields)), folder))
            graph.attention.masks = masks(graph.shape, graph.inputs)
            model = graph.model()
            expected = stateful_greedy(model, prompt)
            ov.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
            (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
            (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 2}))
            results = [verdict(execute, folder, prompt, expected) for execute in (paged, static)]
        print(f"| {name} | {' | '.join(results)} |")


if __name__ == "__main__":
    main()
