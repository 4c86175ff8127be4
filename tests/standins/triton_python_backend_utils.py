"""Stand-in for the module that Triton's Python backend gives its models: enough to call them without a server."""

from __future__ import annotations

import threading
from typing import Any

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class TritonModelException(Exception):
    pass


class TritonError:
    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        self._message = message
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


class Tensor:
    def __init__(self, name: str, value: Any) -> None:
        self._name = name
        self._value = value

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> Any:
        return self._value


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None) -> None:
        self._tensors = output_tensors or []
        self._error = error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def arrays(self) -> dict[str, Any]:
        return {tensor.name(): tensor.as_numpy() for tensor in self._tensors}


class ResponseSender:
    """Like Triton's: nothing may be sent, or asked, after the final flag."""

    def __init__(self) -> None:
        self.responses: list[InferenceResponse] = []
        self.final = threading.Event()
        self.cancelled = False
        self.misuse: list[str] = []

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        if self.final.is_set():
            self.misuse.append("send after the final flag")
        if response is not None:
            self.responses.append(response)
        if flags & TRITONSERVER_RESPONSE_COMPLETE_FINAL:
            self.final.set()

    def is_cancelled(self) -> bool:
        if self.final.is_set():
            self.misuse.append("is_cancelled after the final flag")
        return self.cancelled


class InferenceRequest:
    def __init__(self, inputs: list[Tensor], request_id: str = "", requested: tuple[str, ...] = ()) -> None:
        self._inputs = inputs
        self._requested = requested
        self._id = request_id
        self.sender = ResponseSender()

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._id

    def requested_output_names(self) -> list[str]:
        return list(self._requested)

    def get_response_sender(self) -> ResponseSender:
        return self.sender


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    return next((tensor for tensor in request.inputs() if tensor.name() == name), None)


def using_decoupled_model_transaction_policy(config: dict[str, Any]) -> bool:
    return bool(config.get("model_transaction_policy", {}).get("decoupled", False))
