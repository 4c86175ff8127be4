"""Triton Python model `postprocessing`: token ids to text.

A tensorrt_llm model that makes exact text itself (one that runs in Python) sends it as OUTPUT_TEXT; it is passed on as
it is, so any number of instances serve streams exactly. Without it each response is decoded alone, which is exact for
whole answers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from detokenizer import Vocabulary, decode


class TritonPythonModel:
    """See the module."""

    def initialize(self, args: dict[str, str]) -> None:
        parameters = json.loads(args["model_config"]).get("parameters", {})
        folder = Path(args["model_repository"]) / args["model_version"]
        self._skip_special_tokens = parameters.get("skip_special_tokens", {}).get("string_value", "true") == "true"
        self._vocabulary = Vocabulary.load(folder / parameters["tokenizer_dir"]["string_value"])

    def execute(self, requests: list[Any]) -> list[Any]:
        responses = []
        for request in requests:
            try:
                responses.append(self._answer(request))
            except Exception as error:  # it concerns this request and not the others of the batch
                failure = pb_utils.TritonError(f"{type(error).__name__}: {error}", pb_utils.TritonError.INTERNAL)
                responses.append(pb_utils.InferenceResponse(error=failure))
        return responses

    def _answer(self, request: Any) -> Any:
        text = pb_utils.get_input_tensor_by_name(request, "OUTPUT_TEXT")
        values = self._decode(request) if text is None else text.as_numpy().reshape(-1)
        # One dimension, whatever the beams: official clients read text_output[0].
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT", np.array(values, dtype=object))])

    def _decode(self, request: Any) -> list[bytes]:
        ids = pb_utils.get_input_tensor_by_name(request, "TOKENS_BATCH").as_numpy()
        lengths = pb_utils.get_input_tensor_by_name(request, "SEQUENCE_LENGTH").as_numpy()
        skip = self._skip_special_tokens
        return [
            decode(self._vocabulary, beam[:length].tolist(), skip_special_tokens=skip).encode()
            for row, row_lengths in zip(ids, lengths)
            for beam, length in zip(row, row_lengths)
        ]
