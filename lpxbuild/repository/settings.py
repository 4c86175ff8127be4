"""What a repository is rendered with, and the backends that one can be rendered for."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field

from lpxbuild.errors import UsageError
from lpxbuild.repository.tensors import BLS, ENSEMBLE, POSTPROCESSING, PREPROCESSING, TENSORRT_LLM

# With any other Python, a BLS call into a decoupled model ends the stub of Triton 2.51 (segmentation fault in the
# embedded interpreter, seen on 3.12 within 20 calls).
BLS_PYTHON = "3.11"


@dataclass(frozen=True)
class BackendLayout:
    """How one backend appears in the repository.

    Args:
        triton_backend: `backend` of tensorrt_llm's config.pbtxt.
        engine_files: files that its engine folder must hold.
    """

    triton_backend: str
    engine_files: tuple[str, ...]


BACKENDS: dict[str, BackendLayout] = {
    "openvino": BackendLayout(
        triton_backend="python",
        engine_files=("engine.json", "openvino_model.xml", "openvino_model.bin", "config.json"),
    ),
}


def _running_python() -> str:
    return f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class RepositorySettings:
    """Everything in a repository that is not decided by the engine.

    Args:
        backend: executes tensorrt_llm.
        max_batch_size: rows of one request, and requests that Triton hands over together; the same in all models.
        max_beam_width: widest beam search a request may ask for.
        decoupled: several responses per request (streaming).
        max_queue_delay_microseconds: how long Triton waits to form a batch.
        max_queue_size: waiting requests before new ones are rejected; 0 = no bound.
        engine_python: interpreter of the engine host; "" = first `python3` in the server's PATH.
        server_python: "X.Y" of the Python that the server's stubs embed; decides whether BLS can be served.
        bls: also render tensorrt_llm_bls.
    """

    backend: str = "openvino"
    max_batch_size: int = 8
    max_beam_width: int = 1
    decoupled: bool = True
    max_queue_delay_microseconds: int = 0
    max_queue_size: int = 0
    preprocessing_instances: int = 1
    postprocessing_instances: int = 1
    tensorrt_llm_instances: int = 1
    bls_instances: int = 1
    engine_python: str = ""
    server_python: str = field(default_factory=_running_python)
    bls: bool = True
    add_special_tokens: bool = True
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Refuse what Triton or the backend would accept and then get wrong.

        Raises:
            UsageError: a count below its minimum, a backend that no repository can be rendered for, beam search
                together with streaming.
        """
        if self.backend not in BACKENDS:
            raise UsageError(
                f"no Triton repository can be rendered for backend {self.backend}",
                why=f"this version of lpx renders: {', '.join(BACKENDS)}",
                next=f"set `backend: {next(iter(BACKENDS))}` in the recipe",
            )
        for name, least in (
            ("max_batch_size", 1),
            ("max_beam_width", 1),
            ("max_queue_delay_microseconds", 0),
            ("max_queue_size", 0),
            ("preprocessing_instances", 1),
            ("postprocessing_instances", 1),
            ("tensorrt_llm_instances", 1),
            ("bls_instances", 1),
        ):
            if getattr(self, name) < least:
                raise UsageError(
                    f"{name} is {getattr(self, name)}",
                    why=f"it must be at least {least}",
                    next=f"set {name} to {least} or more",
                )
        if self.decoupled and self.max_beam_width > 1:
            raise UsageError(
                f"beam search (max_beam_width {self.max_beam_width}) and streaming (decoupled) are both asked for",
                why="beam search returns whole sequences; it cannot be streamed",
                next="set serve.streaming: false or limits.max_beam_width: 1 in the recipe",
            )

    @property
    def models(self) -> tuple[str, ...]:
        """Folders of the repository."""
        base = (PREPROCESSING, TENSORRT_LLM, POSTPROCESSING, ENSEMBLE)
        return (*base, BLS) if self.bls and self.server_python == BLS_PYTHON else base

    def instances(self, model: str) -> int:
        """Processes of one model; 0 for the ensemble, which has none."""
        return {
            PREPROCESSING: self.preprocessing_instances,
            TENSORRT_LLM: self.tensorrt_llm_instances,
            POSTPROCESSING: self.postprocessing_instances,
            ENSEMBLE: 0,
            BLS: self.bls_instances,
        }[model]
