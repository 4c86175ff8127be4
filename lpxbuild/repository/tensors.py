"""The tensors of every model of the repository: the official `inflight_batcher_llm` names, types and shapes.

`tensorrt_llm` is read from `model_repo/tensorrt_llm/tensors.json`, which its own model reads too; the others are
the tables below. Shapes are without the batch dimension; -1 = any size.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from lpxbuild.shipped import shipped

PREPROCESSING = "preprocessing"
TENSORRT_LLM = "tensorrt_llm"
POSTPROCESSING = "postprocessing"
ENSEMBLE = "ensemble"
BLS = "tensorrt_llm_bls"


@dataclass(frozen=True)
class Tensor:
    """One input or output.

    Args:
        data_type: without `TYPE_`: INT32, STRING, ...
        reshape: `()` turns dims `(1,)` into a scalar per batch row inside the backend; None = as sent.
        ragged: requests of different sizes may form one batch.
    """

    name: str
    data_type: str
    dims: tuple[int, ...] = (1,)
    optional: bool = False
    reshape: tuple[int, ...] | None = None
    ragged: bool = False


@dataclass(frozen=True)
class RequestInput(Tensor):
    """An input of tensorrt_llm and what becomes of it.

    Args:
        ensemble: tensor of the ensemble mapped to it; None = only reachable by calling tensorrt_llm itself.
        client: the ensemble input that fills it, where there is one.
        neutral: element values that mean the same as not sending a refused input.
        backends: backend -> "honoured", "honoured: NOTE" or "refused".
    """

    ensemble: str | None = None
    client: str | None = None
    neutral: tuple[Any, ...] = ()
    backends: Mapping[str, str] | None = None

    def honoured_by(self, backend: str) -> bool:
        """Whether the backend does what the input asks."""
        return (self.backends or {})[backend].startswith("honoured")


@dataclass(frozen=True)
class RequestOutput(Tensor):
    """An output of tensorrt_llm; `official` False = added by lpx, `backends` = who produces it."""

    ensemble: str | None = None
    official: bool = True
    backends: tuple[str, ...] = ()


@dataclass(frozen=True)
class Interface:
    """All tensors of one model."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class Step:
    """One step of the ensemble; both maps go from the model's tensor to the ensemble's."""

    model: str
    inputs: Mapping[str, str]
    outputs: Mapping[str, str]


def _optional(data_type: str, *names: str, dims: tuple[int, ...] = (1,), ragged: bool = False) -> tuple[Tensor, ...]:
    return tuple(Tensor(name, data_type, dims, optional=True, ragged=ragged) for name in names)


def _scalar(data_type: str, *names: str) -> tuple[Tensor, ...]:
    return tuple(Tensor(name, data_type, (1,), optional=True, reshape=()) for name in names)


_PREPROCESSING = Interface(
    inputs=(
        Tensor("QUERY", "STRING"),
        *_optional("STRING", "DECODER_QUERY"),
        *_optional("UINT8", "IMAGE_BYTES", dims=(-1, -1, -1, -1)),
        *_optional("STRING", "IMAGE_URL"),
        *_optional("STRING", "IMAGES", dims=(-1,)),
        *_optional("UINT8", "VIDEO_BYTES", dims=(-1, -1, -1, -1)),
        Tensor("REQUEST_OUTPUT_LEN", "INT32"),
        *_optional("STRING", "BAD_WORDS_DICT", "STOP_WORDS_DICT", "EMBEDDING_BIAS_WORDS", dims=(-1,)),
        *_optional("FP32", "EMBEDDING_BIAS_WEIGHTS", dims=(-1,)),
        *_optional("INT32", "END_ID", "PAD_ID"),
        *_optional("UINT64", "PROMPT_TABLE_EXTRA_ID"),
    ),
    outputs=(
        Tensor("INPUT_ID", "INT32", (-1,)),
        Tensor("REQUEST_INPUT_LEN", "INT32"),
        Tensor("DECODER_INPUT_ID", "INT32", (-1,)),
        Tensor("REQUEST_DECODER_INPUT_LEN", "INT32"),
        Tensor("BAD_WORDS_IDS", "INT32", (2, -1)),
        Tensor("STOP_WORDS_IDS", "INT32", (2, -1)),
        Tensor("EMBEDDING_BIAS", "FP32", (-1,)),
        Tensor("REQUEST_OUTPUT_LEN", "INT32", (-1,)),
        Tensor("OUT_END_ID", "INT32"),
        Tensor("OUT_PAD_ID", "INT32"),
        Tensor("OUT_PROMPT_TABLE_EXTRA_IDS", "UINT64", (-1,)),
        Tensor("PIXEL_VALUES", "FP16", (-1, -1, -1, -1)),
        Tensor("ASPECT_RATIO_IDS", "INT64", (-1,)),
        Tensor("ASPECT_RATIO_MASK", "INT64", (-1, -1)),
        Tensor("CROSS_ATTENTION_MASK", "INT64", (-1, -1, -1)),
        Tensor("IMAGE_SIZES", "INT64", (-1, 2)),
        Tensor("IS_VIDEO_INPUT", "BOOL"),
        Tensor("ATTENTION_MASK", "INT64", (-1,)),
        Tensor("IMAGE_GRID_THW", "INT64", (3,)),
        Tensor("VISION_INPUT_ID", "INT32", (-1,)),
    ),
)

_POSTPROCESSING = Interface(
    inputs=(
        Tensor("TOKENS_BATCH", "INT32", (-1, -1)),
        Tensor("SEQUENCE_LENGTH", "INT32", (-1,)),
        # Not official: the exact text that a Python-backed tensorrt_llm has already made.
        *_optional("STRING", "OUTPUT_TEXT", dims=(-1,)),
    ),
    outputs=(Tensor("OUTPUT", "STRING", (-1,)),),
)

_ENSEMBLE_INPUTS = (
    Tensor("text_input", "STRING"),
    *_optional("STRING", "decoder_text_input"),
    Tensor("max_tokens", "INT32"),
    *_optional("INT32", "num_return_sequences"),
    *_optional("STRING", "bad_words", "stop_words", dims=(-1,)),
    *_optional("BOOL", "exclude_input_in_output"),
    *_optional("INT32", "end_id", "pad_id", "top_k"),
    *_optional("FP32", "top_p", "temperature", "length_penalty", "repetition_penalty"),
    *_optional("INT32", "min_tokens"),
    *_optional("FP32", "presence_penalty", "frequency_penalty"),
    *_optional("UINT64", "seed"),
    *_optional("BOOL", "return_log_probs", "return_context_logits", "return_generation_logits"),
    *_optional("BOOL", "return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens"),
    *_optional("INT32", "beam_width"),
    *_optional("BOOL", "stream"),
    *_optional("FP16", "prompt_embedding_table", dims=(-1, -1)),
    *_optional("UINT64", "prompt_table_extra_id"),
    *_optional("INT32", "prompt_vocab_size"),
    *_optional("STRING", "embedding_bias_words", dims=(-1,)),
    *_optional("FP32", "embedding_bias_weights", dims=(-1,)),
    *_optional("UINT64", "lora_task_id"),
    *_optional("FP16", "lora_weights", dims=(-1, -1), ragged=True),
    *_optional("INT32", "lora_config", dims=(-1, 3), ragged=True),
    *_optional("STRING", "guided_decoding_guide_type", "guided_decoding_guide", ragged=True),
)

_TEXT_OUTPUT = Tensor("text_output", "STRING", (-1,))

_BLS_INPUTS = (
    Tensor("text_input", "STRING"),
    *_optional("STRING", "decoder_text_input"),
    *_optional("FP16", "image_input", dims=(-1, 3, -1, -1)),
    *_optional("UINT8", "image_bytes_input", dims=(-1, -1, -1, -1)),
    *_optional("STRING", "image_url_input"),
    *_optional("UINT8", "video_bytes_input", dims=(-1, -1, -1, -1)),
    Tensor("max_tokens", "INT32"),
    *_optional("STRING", "bad_words", "stop_words", dims=(-1,)),
    *_optional("BOOL", "exclude_input_in_output"),
    *_optional("INT32", "end_id", "pad_id", "top_k"),
    *_optional("FP32", "top_p", "temperature", "length_penalty", "repetition_penalty"),
    *_optional("INT32", "min_tokens"),
    *_optional("FP32", "presence_penalty", "frequency_penalty"),
    *_optional("UINT64", "seed"),
    *_scalar("BOOL", "return_log_probs", "return_context_logits", "return_generation_logits"),
    *_scalar("INT32", "num_return_sequences"),
    *_optional("INT32", "beam_width"),
    *_optional("BOOL", "stream"),
    *_optional("FP16", "prompt_embedding_table", dims=(-1, -1)),
    *_optional("INT32", "prompt_vocab_size"),
    *_optional("UINT64", "prompt_table_extra_id"),
    *_optional("STRING", "embedding_bias_words", dims=(-1,)),
    *_optional("FP32", "embedding_bias_weights", dims=(-1,)),
    *_optional("INT32", "num_draft_tokens"),
    *_scalar("BOOL", "use_draft_logits"),
    *_scalar("UINT64", "lora_task_id"),
    *_optional("FP16", "lora_weights", dims=(-1, -1), ragged=True),
    *_optional("INT32", "lora_config", dims=(-1, 3), ragged=True),
    *_scalar("BOOL", "return_perf_metrics", "return_num_input_tokens", "return_num_output_tokens"),
    *_optional("STRING", "guided_decoding_guide_type", "guided_decoding_guide"),
)

_PREPROCESSING_STEP = Step(
    PREPROCESSING,
    inputs={
        "QUERY": "text_input",
        "DECODER_QUERY": "decoder_text_input",
        "REQUEST_OUTPUT_LEN": "max_tokens",
        "BAD_WORDS_DICT": "bad_words",
        "STOP_WORDS_DICT": "stop_words",
        "EMBEDDING_BIAS_WORDS": "embedding_bias_words",
        "EMBEDDING_BIAS_WEIGHTS": "embedding_bias_weights",
        "END_ID": "end_id",
        "PAD_ID": "pad_id",
        "PROMPT_TABLE_EXTRA_ID": "prompt_table_extra_id",
    },
    outputs={
        "REQUEST_INPUT_LEN": "_REQUEST_INPUT_LEN",
        "INPUT_ID": "_INPUT_ID",
        "REQUEST_DECODER_INPUT_LEN": "_REQUEST_DECODER_INPUT_LEN",
        "DECODER_INPUT_ID": "_DECODER_INPUT_ID",
        "REQUEST_OUTPUT_LEN": "_REQUEST_OUTPUT_LEN",
        "STOP_WORDS_IDS": "_STOP_WORDS_IDS",
        "BAD_WORDS_IDS": "_BAD_WORDS_IDS",
        "EMBEDDING_BIAS": "_EMBEDDING_BIAS",
        "OUT_END_ID": "_PREPROCESSOR_END_ID",
        "OUT_PAD_ID": "_PREPROCESSOR_PAD_ID",
        "OUT_PROMPT_TABLE_EXTRA_IDS": "_OUT_PROMPT_TABLE_EXTRA_IDS",
    },
)


@cache
def request_inputs() -> tuple[RequestInput, ...]:
    """Inputs of tensorrt_llm, in the official order."""
    return tuple(
        RequestInput(
            name=row["name"],
            data_type=row["data_type"].removeprefix("TYPE_"),
            dims=tuple(row["dims"]),
            optional=row["optional"],
            reshape=None if row["reshape"] is None else tuple(row["reshape"]),
            ragged=row["ragged"],
            ensemble=row["ensemble"],
            client=row["client"],
            neutral=tuple(row.get("neutral", ())),
            backends=row["backends"],
        )
        for row in _table()["inputs"]
    )


@cache
def request_outputs() -> tuple[RequestOutput, ...]:
    """Outputs of tensorrt_llm, in the official order; lpx's own last."""
    return tuple(
        RequestOutput(
            name=row["name"],
            data_type=row["data_type"].removeprefix("TYPE_"),
            dims=tuple(row["dims"]),
            ensemble=row["ensemble"],
            official=row["official"],
            backends=tuple(row["backends"]),
        )
        for row in _table()["outputs"]
    )


def interface(model: str, backend: str) -> Interface:
    """Inputs and outputs of one model of the repository.

    Args:
        model: preprocessing, tensorrt_llm, postprocessing, ensemble or tensorrt_llm_bls.
        backend: what executes tensorrt_llm; decides which outputs it has.
    """
    produced = tuple(output for output in request_outputs() if backend in output.backends)
    visible = tuple(output for output in produced if output.ensemble and not output.ensemble.startswith("_"))
    return {
        PREPROCESSING: _PREPROCESSING,
        TENSORRT_LLM: Interface(request_inputs(), produced),
        POSTPROCESSING: _POSTPROCESSING,
        ENSEMBLE: Interface(_ENSEMBLE_INPUTS, (_TEXT_OUTPUT, *visible)),
        BLS: Interface(_BLS_INPUTS, (_TEXT_OUTPUT, *visible)),
    }[model]


def ensemble_steps(backend: str) -> tuple[Step, ...]:
    """The steps of the ensemble; the last one passes on the exact text where tensorrt_llm makes it."""
    produced = {output.name: output.ensemble for output in request_outputs() if backend in output.backends}
    postprocessing = {"TOKENS_BATCH": "_TOKENS_BATCH", "SEQUENCE_LENGTH": "_SEQUENCE_LENGTH"}
    if "output_text" in produced:
        postprocessing["OUTPUT_TEXT"] = "_OUTPUT_TEXT"
    return (
        _PREPROCESSING_STEP,
        Step(
            TENSORRT_LLM,
            inputs={tensor.name: tensor.ensemble for tensor in request_inputs() if tensor.ensemble},
            outputs={name: ensemble for name, ensemble in produced.items() if ensemble},
        ),
        Step(POSTPROCESSING, inputs=postprocessing, outputs={"OUTPUT": "text_output"}),
    )


def _table() -> dict[str, Any]:
    path = shipped("model_repo") / TENSORRT_LLM / "tensors.json"
    table: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return table
