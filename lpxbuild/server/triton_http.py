"""The few HTTP calls that launching and watching a Triton server needs, with the standard library only."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Parameter of a model's configuration that says when lpx loaded it again.
LOAD_PARAMETER = "lpx_loaded_again_ns"


class TritonHttpError(Exception):
    """No answer, or an answer that says error. `status` is None where there was no answer."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


@dataclass(frozen=True)
class TritonHttp:
    """Client of one server.

    Args:
        address: host and port, e.g. "127.0.0.1:8000" (IPv6 in brackets).
    """

    address: str

    def is_ready(self) -> bool:
        """Whether all models are loaded (not: whether they work)."""
        try:
            self._call("GET", "/v2/health/ready", timeout=2)
        except TritonHttpError:
            return False
        return True

    def load(self, model: str, timeout: float) -> None:
        """Load or reload one model; no other model is loaded with it.

        With its own configuration, and in it a parameter that was never there before: without a change Triton keeps
        the instances that it has, also when their processes are dead.
        """
        config = self._json("GET", f"/v2/models/{model}/config", timeout=timeout)
        config.setdefault("parameters", {})[LOAD_PARAMETER] = {"string_value": str(time.time_ns())}
        body = {"parameters": {"config": json.dumps(config)}}
        self._call("POST", f"/v2/repository/models/{model}/load", body, timeout=timeout)

    def model_states(self, timeout: float) -> dict[str, str]:
        """Model → READY, UNAVAILABLE, LOADING … of the repository index ("" where it was never loaded)."""
        index = self._json("POST", "/v2/repository/index", timeout=timeout)
        return {entry["name"]: entry.get("state", "") for entry in index}

    def answers_given(self, timeout: float) -> dict[str, int]:
        """Model → number of answers so far, each delta of a stream counted: the progress that a busy server makes."""
        statistics = self._json("GET", "/v2/models/stats", timeout=timeout)
        found: dict[str, int] = {}
        for entry in statistics["model_stats"]:
            finished = entry.get("inference_stats", {})
            count = sum(int(finished.get(kind, {}).get("count", 0)) for kind in ("success", "fail"))
            for response in entry.get("response_stats", {}).values():
                count += sum(int(response.get(kind, {}).get("count", 0)) for kind in ("success", "fail"))
            found[entry["name"]] = found.get(entry["name"], 0) + count
        return found

    def infer(self, model: str, inputs: list[dict[str, Any]], timeout: float) -> dict[str, Any]:
        """One request to a model that is not decoupled; `inputs` as in the KServe protocol."""
        answer: dict[str, Any] = self._json("POST", f"/v2/models/{model}/infer", {"inputs": inputs}, timeout=timeout)
        return answer

    def generate(self, model: str, body: dict[str, Any], timeout: float) -> dict[str, Any]:
        """One request of the generate extension with one answer; works on decoupled models too."""
        answer: dict[str, Any] = self._json("POST", f"/v2/models/{model}/generate", body, timeout=timeout)
        # Triton answers some errors with status 200.
        if "error" in answer:
            raise TritonHttpError(str(answer["error"]), 200)
        return answer

    def generate_stream(self, model: str, body: dict[str, Any], timeout: float) -> Iterator[dict[str, Any]]:
        """The server-sent events of one request; `timeout` is the longest silence between two of them, in seconds."""
        connection = http.client.HTTPConnection(self.address, timeout=timeout)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request("POST", f"/v2/models/{model}/generate_stream", json.dumps(body), headers)
            response = connection.getresponse()
            for line in _lines(response):
                if line.startswith(b"data:"):
                    event = json.loads(line[5:])
                    if "error" in event:
                        raise TritonHttpError(str(event["error"]), response.status)
                    yield event
                elif response.status != 200:
                    raise TritonHttpError(line.decode(errors="replace"), response.status)
        except (OSError, http.client.HTTPException, ValueError) as error:
            raise TritonHttpError(f"stream of {model} broke: {error or type(error).__name__}") from error
        finally:
            connection.close()

    def _json(self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout: float) -> Any:
        content = self._call(method, path, body, timeout=timeout)
        try:
            return json.loads(content)
        except ValueError as error:
            raise TritonHttpError(f"{path}: the answer is not JSON: {error}") from error

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None, *, timeout: float) -> bytes:
        connection = http.client.HTTPConnection(self.address, timeout=timeout)
        try:
            headers = {"Content-Type": "application/json"}
            connection.request(method, path, json.dumps(body) if body is not None else None, headers)
            response = connection.getresponse()
            content = response.read()
        except (OSError, http.client.HTTPException) as error:
            raise TritonHttpError(f"{path}: {error or type(error).__name__}") from error
        finally:
            connection.close()
        if response.status != 200:
            text = content.decode(errors="replace")
            try:
                text = str(json.loads(text)["error"])
            except (ValueError, KeyError, TypeError):
                text = text.strip() or response.reason
            raise TritonHttpError(text, response.status)
        return content


def _lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Lines as they arrive. Iterating over the response itself takes a body that breaks off for one that has ended."""
    rest = b""
    while part := response.read1(1 << 16):
        *lines, rest = (rest + part).split(b"\n")
        yield from lines
    if rest:
        yield rest
