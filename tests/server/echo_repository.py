"""A stand-in repository of the official layout: byte tokens, an echo in place of a model. For tests of the server only.

Text and token ids are the same thing here (one id per byte), so that every expected value can be written down by hand:
`tensorrt_llm` repeats the prompt's ids until it has made `request_output_len` of them.
"""

from __future__ import annotations

import shutil
from pathlib import Path

MODELS = Path(__file__).parent / "echo_models"


def _tensor(name: str, kind: str, dims: str, *, optional: bool = False, scalar: bool = False) -> str:
    extra = " optional: true" if optional else ""
    reshape = " reshape: { shape: [ ] }" if scalar else ""
    return f'{{ name: "{name}" data_type: TYPE_{kind} dims: [ {dims} ]{reshape}{extra} }}'


def _block(kind: str, tensors: list[str]) -> str:
    return f"{kind} [\n  " + ",\n  ".join(tensors) + "\n]\n"


def _map(kind: str, pairs: dict[str, str]) -> str:
    return "".join(f'    {kind} {{ key: "{key}" value: "{value}" }}\n' for key, value in pairs.items())


def make(folder: Path, *, streaming: bool = True, token_delay: float = 0.0, text_instances: int = 1) -> Path:
    """Write the repository: preprocessing, tensorrt_llm, postprocessing, ensemble."""
    options = [
        ("stop", "BOOL"),
        ("streaming", "BOOL"),
        ("end_id", "INT32"),
        ("pad_id", "INT32"),
        ("runtime_top_k", "INT32"),
        ("temperature", "FP32"),
        ("seed", "UINT64"),
    ]
    configs = {
        "preprocessing": _block(
            "input",
            [
                _tensor("QUERY", "STRING", "1"),
                _tensor("REQUEST_OUTPUT_LEN", "INT32", "1"),
                _tensor("STOP_WORDS_DICT", "STRING", "-1", optional=True),
            ],
        )
        + _block(
            "output",
            [
                _tensor("INPUT_ID", "INT32", "-1"),
                _tensor("REQUEST_INPUT_LEN", "INT32", "1"),
                _tensor("REQUEST_OUTPUT_LEN", "INT32", "-1"),
            ],
        )
        + f"instance_group [ {{ count: {text_instances} kind: KIND_CPU }} ]\n",
        "tensorrt_llm": f"model_transaction_policy {{ decoupled: {str(streaming).lower()} }}\n"
        + _block(
            "input",
            [
                _tensor("input_ids", "INT32", "-1", optional=True),
                _tensor("input_lengths", "INT32", "1", scalar=True),
                _tensor("request_output_len", "INT32", "1", scalar=True),
                *(_tensor(name, kind, "1", optional=True, scalar=True) for name, kind in options),
            ],
        )
        + _block("output", [_tensor("output_ids", "INT32", "-1, -1"), _tensor("sequence_length", "INT32", "-1")])
        + f'parameters {{ key: "token_delay" value: {{ string_value: "{token_delay}" }} }}\n'
        + "instance_group [ { count: 1 kind: KIND_CPU } ]\n",
        "postprocessing": _block(
            "input", [_tensor("TOKENS_BATCH", "INT32", "-1, -1"), _tensor("SEQUENCE_LENGTH", "INT32", "-1")]
        )
        + _block("output", [_tensor("OUTPUT", "STRING", "-1")])
        + f"instance_group [ {{ count: {text_instances} kind: KIND_CPU }} ]\n",
    }
    ensemble = _block(
        "input",
        [
            _tensor("text_input", "STRING", "1"),
            _tensor("max_tokens", "INT32", "1"),
            _tensor("stop_words", "STRING", "-1", optional=True),
            _tensor("stream", "BOOL", "1", optional=True),
            _tensor("seed", "UINT64", "1", optional=True),
            _tensor("temperature", "FP32", "1", optional=True),
            _tensor("top_k", "INT32", "1", optional=True),
        ],
    ) + _block("output", [_tensor("text_output", "STRING", "-1")])
    steps = {
        "preprocessing": (
            {"QUERY": "text_input", "REQUEST_OUTPUT_LEN": "max_tokens", "STOP_WORDS_DICT": "stop_words"},
            {"INPUT_ID": "_ids", "REQUEST_INPUT_LEN": "_input_length", "REQUEST_OUTPUT_LEN": "_output_length"},
        ),
        "tensorrt_llm": (
            {
                "input_ids": "_ids",
                "input_lengths": "_input_length",
                "request_output_len": "_output_length",
                "streaming": "stream",
                "seed": "seed",
                "temperature": "temperature",
                "runtime_top_k": "top_k",
            },
            {"output_ids": "_tokens", "sequence_length": "_lengths"},
        ),
        "postprocessing": ({"TOKENS_BATCH": "_tokens", "SEQUENCE_LENGTH": "_lengths"}, {"OUTPUT": "text_output"}),
    }
    ensemble += "ensemble_scheduling {\n"
    for model, (inputs, outputs) in steps.items():
        ensemble += f'  step {{\n    model_name: "{model}" model_version: -1\n'
        ensemble += _map("input_map", inputs) + _map("output_map", outputs) + "  }\n"
    ensemble += "}\n"
    for name, config in configs.items():
        version = folder / name / "1"
        version.mkdir(parents=True)
        (folder / name / "config.pbtxt").write_text(f'name: "{name}"\nbackend: "python"\nmax_batch_size: 8\n{config}')
        shutil.copy(MODELS / f"{name}.py", version / "model.py")
    (folder / "ensemble" / "1").mkdir(parents=True)
    (folder / "ensemble" / "config.pbtxt").write_text(
        f'name: "ensemble"\nplatform: "ensemble"\nmax_batch_size: 8\n{ensemble}'
    )
    return folder
