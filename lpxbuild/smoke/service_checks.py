"""Checks of the service: alive, described as it lies on disk, and refusing wrong requests without harm."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from lpxbuild.smoke.client import ENSEMBLE, RequestFailed
from lpxbuild.smoke.registry import PROMPT, CheckFailed, Skipped, Subject, check, require

# A server that is alive says so at once; whoever says nothing for so long is no Triton, or a hanging one.
LIVENESS_SECONDS = 10.0
# Errors that say "your request is wrong"; an error inside a gRPC stream carries no status at all.
CLEAN = ("INVALID_ARGUMENT", "400", "")


@check("liveness")
def liveness(subject: Subject) -> str:
    """Live and ready, over HTTP and gRPC, the ensemble too."""
    from tritonclient import http
    from tritonclient.utils import InferenceServerException

    idle = min(subject.client.idle, LIVENESS_SECONDS)
    over_http = http.InferenceServerClient(subject.client.http_url, connection_timeout=idle, network_timeout=idle)
    try:
        with subject.client.grpc() as over_grpc:
            answers = {
                "HTTP live": over_http.is_server_live(),
                "HTTP ready": over_http.is_server_ready(),
                "HTTP ensemble ready": over_http.is_model_ready(ENSEMBLE),
                "gRPC live": over_grpc.is_server_live(client_timeout=idle),
                "gRPC ready": over_grpc.is_server_ready(client_timeout=idle),
                "gRPC ensemble ready": over_grpc.is_model_ready(ENSEMBLE, client_timeout=idle),
            }
            version = over_grpc.get_server_metadata(client_timeout=idle).version
    except (OSError, InferenceServerException) as error:
        raise CheckFailed(f"no answer from {subject.client.http_url} or {subject.client.grpc_url}: {error}") from error
    finally:
        over_http.close()
    require(all(answers.values()), "not so: " + ", ".join(name for name, answer in answers.items() if not answer))
    return f"Triton {version}, live and ready over HTTP and gRPC"


@check("metadata")
def metadata(subject: Subject) -> str:
    """Names, types and dims of every tensor are those of the repository on disk."""
    if subject.repository is None:
        model = subject.client.model(ENSEMBLE)
        missing = [name for name in ("text_input", "max_tokens") if name not in model.inputs]
        require(not missing and "text_output" in model.outputs, f"the ensemble lacks {missing or 'text_output'}")
        return "the ensemble has text_input, max_tokens and text_output (no repository to compare with)"
    from lpxbuild.server import checks

    models = checks.models(Path(subject.repository))
    compared = 0
    for name, written in models.items():
        try:
            served = subject.client.model(name)
        except RequestFailed as error:
            if name == "tensorrt_llm_bls" and "unknown model" in str(error).lower():
                continue  # left out on purpose where it would crash
            raise
        for kind, entries, tensors in (
            ("input", written.config.input, served.inputs),
            ("output", written.config.output, served.outputs),
        ):
            for entry in entries:
                tensor = tensors.get(entry.name)
                require(tensor is not None, f"{name} has no {kind} {entry.name}")
                wanted = (_type_name(entry), tuple(entry.dims))
                found = (tensor.datatype, tensor.dims) if tensor else None
                require(found == wanted, f"{kind} {entry.name} of {name} is {found}, on disk it is {wanted}")
                compared += 1
    return f"{compared} tensors of {len(models)} models as on disk"


def _type_name(entry: Any) -> str:
    from tritonclient.grpc import model_config_pb2

    name = str(model_config_pb2.DataType.Name(entry.data_type)).removeprefix("TYPE_")
    return "BYTES" if name == "STRING" else name


def _refused(subject: Subject, what: str, send: Callable[[], Any]) -> str:
    """The error text of a request that must be refused as wrong; afterwards the server still works."""
    try:
        send()
    except RequestFailed as error:
        text = str(error)
        require(error.status in CLEAN, f"{what} ended with status {error.status or 'none'}: {text}")
    else:
        raise CheckFailed(f"{what} was accepted")
    alive = subject.client.text(subject.greedy(PROMPT, 2))
    require(isinstance(alive, str), "the server does not answer any more")
    return text


@check("over-long prompt")
def over_long_prompt(subject: Subject) -> str:
    """A prompt beyond the engine's limit is refused with the numbers, and nothing breaks."""
    limit = subject.max_input_len or 50_000
    # At least one token each, whatever the tokenizer: letters that no vocabulary joins over spaces.
    text = " x7" * (limit + 1)
    error = _refused(subject, f"a prompt of over {limit} tokens", lambda: subject.client.text(subject.greedy(text, 1)))
    if subject.max_input_len is not None:
        require(str(limit) in error, f"the refusal does not name the limit {limit}: {error}")
    return error


@check("wrong type")
def wrong_type(subject: Subject) -> str:
    """A tensor of another type than the declared one is refused, naming the tensor."""

    def send() -> None:
        import numpy as np
        from tritonclient import grpc
        from tritonclient.utils import InferenceServerException

        inputs = subject.client.inputs(ENSEMBLE, [{"text_input": PROMPT}])
        wrong = grpc.InferInput("max_tokens", [1, 1], "FP32")
        wrong.set_data_from_numpy(np.array([[4.0]], np.float32))
        _send_raw(subject, [*inputs, wrong], InferenceServerException)

    error = _refused(subject, "max_tokens as FP32", send)
    require("max_tokens" in error, f"the refusal does not name max_tokens: {error}")
    return error


@check("wrong shape")
def wrong_shape(subject: Subject) -> str:
    """A tensor of another shape than the declared one is refused."""

    def send() -> None:
        import numpy as np
        from tritonclient import grpc
        from tritonclient.utils import InferenceServerException, triton_to_np_dtype

        inputs = subject.client.inputs(ENSEMBLE, [{"text_input": PROMPT}])
        datatype = subject.client.model(ENSEMBLE).inputs["max_tokens"].datatype
        wrong = grpc.InferInput("max_tokens", [1, 3], datatype)
        wrong.set_data_from_numpy(np.full((1, 3), 4, triton_to_np_dtype(datatype)))
        _send_raw(subject, [*inputs, wrong], InferenceServerException)

    return _refused(subject, "max_tokens of shape [1, 3]", send)


def _send_raw(subject: Subject, inputs: list[Any], exception: Any) -> None:
    import queue

    if not subject.streaming:
        with subject.client.grpc() as client:
            try:
                client.infer(ENSEMBLE, inputs, client_timeout=subject.client.idle)
            except exception as error:
                raise RequestFailed(str(error.message()), _status(error)) from error
        return
    answers: queue.Queue[tuple[Any, Any]] = queue.Queue()
    with subject.client.grpc() as client:
        client.start_stream(callback=lambda result, error: answers.put((result, error)))
        try:
            client.async_stream_infer(ENSEMBLE, inputs)
            try:
                _, refusal = answers.get(timeout=subject.client.idle)
            except queue.Empty:
                raise RequestFailed("no answer", "SILENT") from None
        finally:
            client.stop_stream(cancel_requests=True)
    if refusal is not None:
        raise RequestFailed(str(refusal.message()), _status(refusal))


def _status(error: Any) -> str:
    return str(error.status() or "").removeprefix("StatusCode.")


@check("max_tokens 0")
def zero_tokens(subject: Subject) -> str:
    """Nothing to generate is a wrong request."""
    if not subject.client.model(ENSEMBLE).inputs:
        raise Skipped("no ensemble")
    return _refused(subject, "max_tokens 0", lambda: subject.client.text(subject.greedy(PROMPT, 0)))
