"""Requests to a served ensemble, over gRPC and HTTP, with types from the server's own metadata and a limit on silence.

Nothing here waits for ever: `idle` is the longest time, in seconds, between two answers of one request.
"""

from __future__ import annotations

import queue
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from lpxbuild.server.triton_http import TritonHttp, TritonHttpError

ENSEMBLE = "ensemble"
BLS = "tensorrt_llm_bls"
Fields = Mapping[str, Any]


class RequestFailed(Exception):
    """The server answered with an error, broke off, or stayed silent. `status` e.g. "INVALID_ARGUMENT"."""

    def __init__(self, text: str, status: str = "") -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class Tensor:
    """Declared by the server: Triton's type name, and dims without the batch dimension."""

    name: str
    datatype: str
    dims: tuple[int, ...]


@dataclass(frozen=True)
class Model:
    """What the server says about one model."""

    name: str
    inputs: Mapping[str, Tensor]
    outputs: Mapping[str, Tensor]
    max_batch_size: int
    decoupled: bool


@dataclass
class Response:
    """One answer: arrays by output name (absent outputs are absent), and whether Triton called it the last."""

    outputs: dict[str, Any] = field(default_factory=dict)
    final: bool = False

    def texts(self, name: str = "text_output") -> list[str]:
        """The rows of a string output. Bytes that are not UTF-8 become U+FFFD."""
        rows = self.outputs.get(name)
        return [] if rows is None else [bytes(row).decode("utf-8", "replace") for row in rows.reshape(-1)]


class TritonClient:
    """One server.

    Args:
        http_url, grpc_url: "host:port", as tritonclient takes them.
        idle: longest silence, in seconds.
    """

    def __init__(self, http_url: str, grpc_url: str, idle: float) -> None:
        self.http_url = http_url
        self.grpc_url = grpc_url
        self.idle = idle
        self.http = TritonHttp(http_url)
        self._models: dict[str, Model] = {}

    @contextmanager
    def grpc(self) -> Iterator[Any]:
        """A gRPC client of its own: one stream per client is all that tritonclient can do."""
        from tritonclient import grpc

        client = grpc.InferenceServerClient(self.grpc_url)
        try:
            yield client
        finally:
            with suppress(Exception):
                client.close()

    def model(self, name: str) -> Model:
        """Metadata and transaction policy of a model, asked once."""
        if name not in self._models:
            from tritonclient.utils import InferenceServerException

            with self.grpc() as client:
                try:
                    metadata = client.get_model_metadata(name, client_timeout=self.idle)
                    config = client.get_model_config(name, client_timeout=self.idle).config
                except InferenceServerException as error:
                    raise _failed(error) from error
            batched = config.max_batch_size > 0

            def tensors(entries: Any) -> dict[str, Tensor]:
                # The metadata of a batching model shows the batch dimension as a first -1.
                return {
                    entry.name: Tensor(entry.name, entry.datatype, tuple(entry.shape)[1 if batched else 0 :])
                    for entry in entries
                }

            self._models[name] = Model(
                name,
                tensors(metadata.inputs),
                tensors(metadata.outputs),
                config.max_batch_size,
                config.model_transaction_policy.decoupled,
            )
        return self._models[name]

    def declared(self, name: str, fields: Fields) -> dict[str, Any]:
        """The fields whose input the model has: optional ones that an older repository lacks are left out."""
        inputs = self.model(name).inputs
        return {key: value for key, value in fields.items() if key in inputs}

    def inputs(self, name: str, rows: Sequence[Fields]) -> list[Any]:
        """InferInput objects for a batch: `rows` have the same keys and, per key, values of the same length."""
        from tritonclient import grpc

        model = self.model(name)
        made = []
        for key in rows[0]:
            tensor = model.inputs.get(key)
            if tensor is None:
                raise RequestFailed(f"model {name} has no input {key}", "INVALID_ARGUMENT")
            array = _array(tensor, [row[key] for row in rows], batched=model.max_batch_size > 0)
            entry = grpc.InferInput(key, list(array.shape), tensor.datatype)
            entry.set_data_from_numpy(array)
            made.append(entry)
        return made

    def infer(self, name: str, rows: Sequence[Fields]) -> Response:
        """One request with one answer, to a model that is not decoupled."""
        from tritonclient.utils import InferenceServerException

        with self.grpc() as client:
            try:
                result = client.infer(name, self.inputs(name, rows), client_timeout=self.idle)
            except InferenceServerException as error:
                raise _failed(error) from error
            return _response(result)

    @contextmanager
    def stream(self, name: str, rows: Sequence[Fields], *, request_id: str = "") -> Iterator[Iterator[Response]]:
        """The responses of one request; leaving the block early cancels it.

        Iterating raises RequestFailed on an error, and after `idle` seconds of silence.
        """
        from tritonclient.utils import InferenceServerException

        answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
        finished = False

        def responses() -> Iterator[Response]:
            nonlocal finished
            while not finished:
                try:
                    result, error = answers.get(timeout=self.idle)
                except queue.Empty:
                    raise RequestFailed(f"no answer from model {name} for {self.idle:.0f} s", "SILENT") from None
                if error is not None:
                    finished = True
                    raise _failed(error)
                response = _response(result)
                finished = response.final
                yield response

        with self.grpc() as client:
            client.start_stream(callback=lambda result, error: answers.put((result, error)))
            try:
                inputs = self.inputs(name, rows)
                try:
                    client.async_stream_infer(name, inputs, request_id=request_id, enable_empty_final_response=True)
                except InferenceServerException as error:
                    raise _failed(error) from error
                yield responses()
            finally:
                client.stop_stream(cancel_requests=not finished)

    def responses(self, name: str, rows: Sequence[Fields], *, request_id: str = "") -> list[Response]:
        """All answers to one request, whether the model is decoupled or not; empty ones left out."""
        if not self.model(name).decoupled:
            return [self.infer(name, rows)]
        with self.stream(name, rows, request_id=request_id) as stream:
            return [response for response in stream if response.outputs]

    def text(self, fields: Fields, *, model: str = ENSEMBLE) -> str:
        """The whole text for one prompt over gRPC."""
        return "".join(text for response in self.responses(model, [fields]) for text in response.texts())

    def text_over_http(self, fields: Fields) -> str:
        """The same over HTTP: `infer` of tritonclient, or `generate` where the ensemble is decoupled."""
        if self.model(ENSEMBLE).decoupled:
            try:
                return str(self.http.generate(ENSEMBLE, dict(fields), self.idle).get("text_output", ""))
            except TritonHttpError as error:
                raise RequestFailed(str(error), str(error.status or "")) from error
        from tritonclient import http
        from tritonclient.utils import InferenceServerException

        model = self.model(ENSEMBLE)
        client = http.InferenceServerClient(self.http_url, connection_timeout=self.idle, network_timeout=self.idle)
        try:
            inputs = []
            for key, value in fields.items():
                tensor = model.inputs[key]
                array = _array(tensor, [value], batched=model.max_batch_size > 0)
                entry = http.InferInput(key, list(array.shape), tensor.datatype)
                entry.set_data_from_numpy(array)
                inputs.append(entry)
            result = client.infer(ENSEMBLE, inputs)
            rows = result.as_numpy("text_output")
            return b"".join(rows.reshape(-1)).decode("utf-8", "replace")
        except InferenceServerException as error:
            raise _failed(error) from error
        finally:
            client.close()

    def pieces_over_http(self, fields: Fields) -> list[str]:
        """The pieces of `generate_stream`."""
        try:
            events = list(self.http.generate_stream(ENSEMBLE, {**fields, "stream": True}, self.idle))
        except TritonHttpError as error:
            raise RequestFailed(str(error), str(error.status or "")) from error
        return [str(event["text_output"]) for event in events if "text_output" in event]


def _array(tensor: Tensor, values: list[Any], *, batched: bool) -> Any:
    """Values of one input for each row of the batch → an array of the declared type and rank."""
    import numpy as np
    from tritonclient.utils import triton_to_np_dtype

    if tensor.datatype == "BYTES":
        rows = [[text.encode() if isinstance(text, str) else text for text in _list(value)] for value in values]
        array = np.array(rows, dtype=object)
    else:
        array = np.array([np.asarray(value, triton_to_np_dtype(tensor.datatype)) for value in values])
        # A scalar is a tensor of dims [1].
        array = array.reshape(len(values), *(array.shape[1:] or (1,)))
    return array if batched else array[0]


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _response(result: Any) -> Response:
    raw = result.get_response()
    parameter = raw.parameters.get("triton_final_response") if raw.parameters else None
    outputs = {output.name: result.as_numpy(output.name) for output in raw.outputs}
    return Response(outputs, final=bool(parameter.bool_param) if parameter is not None else False)


def _failed(error: Any) -> RequestFailed:
    return RequestFailed(str(error.message()), str(error.status() or "").removeprefix("StatusCode."))
