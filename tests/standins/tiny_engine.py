"""A tiny random Llama-like engine folder for tests of the engine host: real OpenVINO, nothing of lpxbuild.

Two layers, 2 heads of 16, RMS norm, rotary positions, vocabulary 96: enough for the paged transformation to recognise
attention, small enough to compile in a second.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

HIDDEN, HEADS, HEAD_SIZE, LAYERS = 32, 2, 16, 2


def build_model(vocabulary: int = 96, seed: int = 7):
    """Stateful graph input_ids, attention_mask, position_ids, beam_idx -> logits [batch, length, vocabulary]."""
    import numpy as np
    from openvino import Dimension, Model, PartialShape, Type
    from openvino import opset13 as op
    from openvino.op.util import Variable, VariableInfo

    random = np.random.default_rng(seed)

    def ints(value):
        return op.constant(np.array(value, dtype=np.int64))

    def floats(value):
        return op.constant(np.array(value, dtype=np.float32))

    def weight(*shape):
        return op.constant((random.standard_normal(shape) * 0.35).astype(np.float32))

    def norm(x):
        mean = op.reduce_mean(op.power(x, floats([2.0])), ints([-1]), True)
        return op.multiply(x, op.divide(floats([1.0]), op.sqrt(op.add(mean, floats([1e-5])))))

    dynamic = Dimension()
    ids = op.parameter(PartialShape([dynamic, dynamic]), Type.i64, name="input_ids")
    mask_in = op.parameter(PartialShape([dynamic, dynamic]), Type.i64, name="attention_mask")
    positions = op.parameter(PartialShape([dynamic, dynamic]), Type.i64, name="position_ids")
    beam = op.parameter(PartialShape([dynamic]), Type.i32, name="beam_idx")
    for parameter in (ids, mask_in, positions, beam):
        parameter.output(0).set_names({parameter.get_friendly_name()})

    x = op.gather(op.constant(random.standard_normal((vocabulary, HIDDEN)).astype(np.float32)), ids, ints(0))
    batch = op.gather(op.shape_of(ids), ints([0]), ints(0))
    new = op.gather(op.shape_of(ids), ints(1), ints(0))
    total = op.gather(op.shape_of(mask_in), ints(1), ints(0))
    rows = op.unsqueeze(op.range(op.subtract(total, new), total, ints(1), Type.i64), ints(1))
    columns = op.unsqueeze(op.range(ints(0), total, ints(1), Type.i64), ints(0))
    seen = op.less_equal(columns, rows)
    allowed = op.logical_and(
        op.unsqueeze(op.unsqueeze(seen, ints(0)), ints(0)),
        op.not_equal(op.unsqueeze(op.unsqueeze(mask_in, ints(1)), ints(1)), ints(0)),
    )
    mask = op.select(allowed, floats(0.0), floats(-3.4e38))
    inverse = (1.0 / (10000.0 ** (np.arange(0, HEAD_SIZE, 2) / HEAD_SIZE))).astype(np.float32)
    angles = op.multiply(op.convert(op.unsqueeze(positions, ints(2)), Type.f32), op.constant(inverse.reshape(1, 1, -1)))
    angles = op.concat([angles, angles], 2)
    cosine, sine = op.unsqueeze(op.cos(angles), ints(1)), op.unsqueeze(op.sin(angles), ints(1))

    def rotate(t):
        halves = op.variadic_split(t, ints(-1), ints([HEAD_SIZE // 2, HEAD_SIZE // 2]))
        turned = op.concat([op.multiply(halves.output(1), floats([-1.0])), halves.output(0)], -1)
        return op.add(op.multiply(t, cosine), op.multiply(turned, sine))

    sinks = []

    def cached(t, name):
        info = VariableInfo()
        info.data_shape = PartialShape([dynamic, HEADS, dynamic, HEAD_SIZE])
        info.data_type, info.variable_id = Type.f32, name
        variable = Variable(info)
        empty = op.broadcast(floats(0.0), op.concat([batch, ints([HEADS]), ints([0]), ints([HEAD_SIZE])], 0))
        whole = op.concat([op.gather(op.read_value(empty, variable), beam, ints(0)), t], 2)
        sinks.append(op.assign(whole, variable))
        return whole

    for layer in range(LAYERS):
        h = norm(x)
        query, key, value = (
            op.transpose(
                op.reshape(op.matmul(h, weight(HIDDEN, HIDDEN), False, True), ints([0, 0, HEADS, HEAD_SIZE]), True),
                ints([0, 2, 1, 3]),
            )
            for _ in range(3)
        )
        query, key = rotate(query), rotate(key)
        key = cached(key, f"past_key_values.{layer}.keypresent.{layer}.key")
        value = cached(value, f"past_key_values.{layer}.valuepresent.{layer}.value")
        attention = op.scaled_dot_product_attention(query, key, value, mask, floats(HEAD_SIZE**-0.5), causal=False)
        attention = op.reshape(op.transpose(attention, ints([0, 2, 1, 3])), ints([0, 0, HIDDEN]), True)
        x = op.add(x, op.matmul(attention, weight(HIDDEN, HIDDEN), False, True))
        x = op.add(
            x, op.matmul(op.swish(op.matmul(norm(x), weight(64, HIDDEN), False, True)), weight(HIDDEN, 64), False, True)
        )
    logits = op.matmul(norm(x), weight(vocabulary, HIDDEN), False, True)
    result = op.result(logits, name="logits")
    result.output(0).set_names({"logits"})
    return Model([result], sinks, [ids, mask_in, positions, beam], "tiny")


def write_engine(
    folder: Path,
    *,
    vocabulary: int = 96,
    seed: int = 7,
    end_ids: tuple[int, ...] = (2, 3),
    max_input_len: int = 64,
    max_seq_len: int = 96,
    max_beam_width: int = 4,
    max_batch_size: int = 8,
    num_kv_blocks: int = 128,
) -> Path:
    """An engine folder as lpxbuild.engine writes it (engine.json, OpenVINO IR, the files GenAI wants)."""
    import openvino

    folder.mkdir(parents=True, exist_ok=True)
    model = build_model(vocabulary, seed)
    openvino.save_model(model, folder / "openvino_model.xml", compress_to_fp16=False)
    description = {
        "format_version": 1,
        "backend": "openvino",
        "executor": "paged",
        "precision": "exact",
        "properties": {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32", "INFERENCE_NUM_THREADS": 2},
        "scheduler": {
            "num_kv_blocks": num_kv_blocks,
            "dynamic_split_fuse": True,
            "max_num_batched_tokens": 64,
            "max_num_seqs": max_batch_size,
            "enable_prefix_caching": True,
        },
        "limits": {
            "max_batch_size": max_batch_size,
            "max_input_len": max_input_len,
            "max_seq_len": max_seq_len,
            "max_beam_width": max_beam_width,
            "max_num_tokens": 64,
        },
        "vocab_size": vocabulary,
        "end_ids": list(end_ids),
        "pad_id": 0,
        "bos_id": 1,
    }
    (folder / "engine.json").write_text(json.dumps(description))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": list(end_ids), "bos_token_id": 1}))
    return folder


@cache
def _compiled(vocabulary: int, seed: int):
    import openvino

    properties = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    return openvino.Core().compile_model(build_model(vocabulary, seed), "CPU", properties)


def reference_logits(ids: list[int], vocabulary: int = 96, seed: int = 7):
    """Logits [len(ids), vocabulary] of one whole forward pass of the same graph, float32."""
    import numpy as np

    request = _compiled(vocabulary, seed).create_infer_request()
    length = len(ids)
    request.infer(
        {
            "input_ids": np.array([ids], dtype=np.int64),
            "attention_mask": np.ones((1, length), np.int64),
            "position_ids": np.arange(length, dtype=np.int64)[None],
            "beam_idx": np.zeros(1, np.int32),
        }
    )
    return request.get_tensor("logits").data[0].copy()
