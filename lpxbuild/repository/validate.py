"""Check a model repository: every parameter, every tensor, and what the models must agree on.

The server checks little of this: a wrong parameter becomes a default, a member with a smaller batch limit fails on
the first larger request, a wrong tokenizer path ends the load with a trace from inside the stub.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpxbuild.errors import LpxError
from lpxbuild.repository.config import CONFIG_FILE, parse_config, read_tensor
from lpxbuild.repository.ensemble import check_ensemble
from lpxbuild.repository.files import model_files, read_engine
from lpxbuild.repository.findings import Finding
from lpxbuild.repository.parameters import PARAMETERS, problem
from lpxbuild.repository.settings import BACKENDS
from lpxbuild.repository.tensors import (
    BLS,
    ENSEMBLE,
    POSTPROCESSING,
    PREPROCESSING,
    TENSORRT_LLM,
    Tensor,
    interface,
)

if TYPE_CHECKING:
    ModelConfig = Any  # tritonclient ships no types

_REQUIRED = (PREPROCESSING, TENSORRT_LLM, POSTPROCESSING, ENSEMBLE)
_DECOUPLED = (TENSORRT_LLM, BLS)
_WITH_TOKENIZER = (PREPROCESSING, TENSORRT_LLM, POSTPROCESSING)
# Fields of newer servers: the text parser of 2.51 refuses the whole file.
_NEWER_FIELDS = ("model_metrics",)


@dataclass(frozen=True)
class _Repository:
    """The parsed repository: models whose config.pbtxt could be read, and the engine's description if there is one."""

    path: Path
    configs: dict[str, ModelConfig]
    engine: dict[str, Any] | None

    @property
    def backend(self) -> str:
        return str(self.engine["backend"]) if self.engine else next(iter(BACKENDS))

    def version(self, model: str) -> Path:
        return self.path / model / "1"

    def decoupled(self, model: str) -> bool:
        return bool(self.configs[model].model_transaction_policy.decoupled)


def validate(repository: Path) -> list[Finding]:
    """All that is wrong with a repository, in a stable order; empty = it can be served.

    Args:
        repository: folder with preprocessing, tensorrt_llm, postprocessing, ensemble and perhaps tensorrt_llm_bls.
    """
    configs: dict[str, ModelConfig] = {}
    findings = list(_read(repository, configs))
    engine, engine_findings = _engine(repository, configs)
    findings += engine_findings
    parsed = _Repository(repository, configs, engine)
    for model in configs:
        findings += _check_model(parsed, model)
    findings += _check_together(parsed)
    if ENSEMBLE in configs:
        findings += check_ensemble(configs)
    findings += _check_engine(parsed)
    findings += _check_tokenizers(parsed)
    return findings


def _file(model: str) -> str:
    return f"{model}/{CONFIG_FILE}"


def _parameter(config: ModelConfig, key: str) -> str:
    # Reading a missing key of a protobuf map would add it.
    return str(config.parameters[key].string_value) if key in config.parameters else ""


def _read(repository: Path, configs: dict[str, ModelConfig]) -> Iterator[Finding]:
    from google.protobuf.text_format import ParseError

    for model in (*_REQUIRED, BLS):
        path = repository / model / CONFIG_FILE
        if not path.is_file():
            if model in _REQUIRED or path.parent.exists():
                yield Finding(_file(model), "", "the file is missing")
            continue
        try:
            configs[model] = parse_config(path)
        except (ParseError, UnicodeDecodeError) as error:
            yield Finding(_file(model), "", f"Triton cannot parse it: {error}")
        for file in (path, *sorted(path.parent.glob("1/*.py")), *sorted(path.parent.glob("1/*.json"))):
            for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1):
                if "${" in line:
                    name = str(file.relative_to(repository))
                    yield Finding(name, f"line {number}", f"a template field is not filled: {line.strip()}")


def _engine(repository: Path, configs: dict[str, ModelConfig]) -> tuple[dict[str, Any] | None, list[Finding]]:
    if TENSORRT_LLM not in configs:
        return None, []
    folder = _parameter(configs[TENSORRT_LLM], "gpt_model_path")
    path = repository / TENSORRT_LLM / "1" / folder
    if not folder or not path.is_dir():
        return None, []  # said by the check of the parameter
    try:
        return read_engine(path), []
    except LpxError as error:
        return None, [Finding(_file(TENSORRT_LLM), "gpt_model_path", " ".join(filter(None, (error.what, error.why))))]


def _check_model(repository: _Repository, model: str) -> Iterator[Finding]:
    config = repository.configs[model]
    if config.name and config.name != model:
        yield Finding(_file(model), "name", f"is {config.name!r}, the folder is {model!r}")
    layout = BACKENDS.get(repository.backend)
    triton_backend = layout.triton_backend if layout and model == TENSORRT_LLM else "python"
    key, wanted = ("platform", "ensemble") if model == ENSEMBLE else ("backend", triton_backend)
    if getattr(config, key) != wanted:
        yield Finding(_file(model), key, f"is {getattr(config, key)!r}, must be {wanted!r}")
    if config.max_batch_size < 1:
        yield Finding(_file(model), "max_batch_size", f"is {config.max_batch_size}, must be at least 1")
    for field in _NEWER_FIELDS:
        if config.HasField(field):
            yield Finding(_file(model), field, "is a field that Triton 2.51 does not know; it would not load the model")
    if config.response_cache.enable and (model == ENSEMBLE or repository.decoupled(model)):
        yield Finding(
            _file(model), "response_cache", "cannot be used with streaming models; the server would not start"
        )
    yield from _check_files(repository, model)
    yield from _check_tensors(model, "input", config.input, interface(model, repository.backend).inputs)
    yield from _check_tensors(model, "output", config.output, interface(model, repository.backend).outputs)
    yield from _check_parameters(repository, model)
    yield from _check_batching(model, config)


def _check_files(repository: _Repository, model: str) -> Iterator[Finding]:
    version = repository.version(model)
    if not version.is_dir():
        yield Finding(f"{model}/1", "", "the version folder is missing; Triton finds no version of the model")
        return
    for file in model_files(model):
        if not (version / file.name).is_file():
            yield Finding(f"{model}/1/{file.name}", "", "the file is missing")


def _check_tensors(model: str, kind: str, messages: Iterable[Any], wanted: tuple[Tensor, ...]) -> Iterator[Finding]:
    found: dict[str, Tensor] = {}
    for message in messages:
        tensor = read_tensor(message)
        if tensor.name in found:
            yield Finding(_file(model), f"{kind} {tensor.name}", "is given twice")
        found[tensor.name] = tensor
    for tensor in wanted:
        if tensor.name not in found:
            yield Finding(_file(model), f"{kind} {tensor.name}", "is missing; clients of the official layout use it")
            continue
        for field in ("data_type", "dims", "reshape", "optional", "ragged"):
            is_, must = getattr(found[tensor.name], field), getattr(tensor, field)
            if is_ != must:
                text = f"{field} is {_show(is_)}, must be {_show(must)}"
                yield Finding(_file(model), f"{kind} {tensor.name}", text)
    for name in found.keys() - {tensor.name for tensor in wanted}:
        near = difflib.get_close_matches(name, [tensor.name for tensor in wanted], n=1)
        yield Finding(
            _file(model), f"{kind} {name}", f"is not read by {model}" + (f"; meant {near[0]}?" if near else "")
        )


def _show(value: object) -> str:
    return f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)


def _check_parameters(repository: _Repository, model: str) -> Iterator[Finding]:
    parameters = repository.configs[model].parameters
    known = {parameter.key: parameter for parameter in PARAMETERS[model]}
    for key, parameter in known.items():
        if key not in parameters:
            yield Finding(_file(model), key, "the parameter is missing")
            continue
        trouble = problem(parameter.kind, parameters[key].string_value, repository.version(model))
        if trouble:
            yield Finding(_file(model), key, trouble)
    for key in sorted(set(parameters) - set(known)):
        near = difflib.get_close_matches(key, known, n=1)
        yield Finding(_file(model), key, f"{model} reads no such parameter" + (f"; meant {near[0]}?" if near else ""))


def _check_batching(model: str, config: ModelConfig) -> Iterator[Finding]:
    if model == ENSEMBLE:
        if config.instance_group or config.HasField("dynamic_batching"):
            yield Finding(_file(model), "instance_group", "an ensemble has no instances and no batcher of its own")
        return
    if len(config.instance_group) != 1 or config.instance_group[0].count < 1:
        yield Finding(_file(model), "instance_group", "needs one group with a count of at least 1")
    elif config.instance_group[0].Kind.Name(config.instance_group[0].kind) != "KIND_CPU":
        yield Finding(_file(model), "instance_group", "kind must be KIND_CPU: the backend finds its devices itself")
    batching = config.dynamic_batching
    if model == POSTPROCESSING and not batching.preserve_ordering:
        text = "preserve_ordering must be true: with several instances the pieces of a stream would change places"
        yield Finding(_file(model), "dynamic_batching", text)
    for size in batching.preferred_batch_size:
        if not 1 <= size <= config.max_batch_size:
            text = f"preferred_batch_size {size} is not between 1 and max_batch_size {config.max_batch_size}"
            yield Finding(_file(model), "dynamic_batching", text)


def _check_together(repository: _Repository) -> Iterator[Finding]:
    configs = repository.configs
    members = [
        configs[model].max_batch_size for model in (PREPROCESSING, TENSORRT_LLM, POSTPROCESSING) if model in configs
    ]
    for model in (ENSEMBLE, BLS):
        if model in configs and members and configs[model].max_batch_size > min(members):
            text = f"is {configs[model].max_batch_size}, but a member takes no more than {min(members)}"
            yield Finding(_file(model), "max_batch_size", text)
    for model in (PREPROCESSING, POSTPROCESSING):
        if model in configs and repository.decoupled(model):
            yield Finding(_file(model), "decoupled", "is true, but the model answers each request once")
    if TENSORRT_LLM in configs and BLS in configs and repository.decoupled(BLS) != repository.decoupled(TENSORRT_LLM):
        text = f"is {repository.decoupled(BLS)}, {TENSORRT_LLM} has {repository.decoupled(TENSORRT_LLM)}"
        yield Finding(_file(BLS), "decoupled", text.replace("True", "true").replace("False", "false"))


def _check_engine(repository: _Repository) -> Iterator[Finding]:
    if repository.engine is None:
        return
    backend = repository.backend
    file = _file(TENSORRT_LLM)
    if backend not in BACKENDS:
        text = f"the engine is for backend {backend}; this version of lpx serves: {', '.join(BACKENDS)}"
        yield Finding(file, "gpt_model_path", text)
        return
    config = repository.configs[TENSORRT_LLM]
    folder = repository.version(TENSORRT_LLM) / _parameter(config, "gpt_model_path")
    for name in BACKENDS[backend].engine_files:
        if not (folder / name).is_file():
            yield Finding(file, "gpt_model_path", f"the engine has no file {name}")
    limits = repository.engine["limits"]
    width = _parameter(config, "max_beam_width")
    if config.max_batch_size > limits.get("max_batch_size", 0):
        text = f"is {config.max_batch_size}, the engine was built for {limits.get('max_batch_size', 0)}"
        yield Finding(file, "max_batch_size", text)
    if width.isdecimal() and int(width) > limits.get("max_beam_width", 0):
        text = f"is {width}, the engine was built for {limits.get('max_beam_width', 0)}"
        yield Finding(file, "max_beam_width", text)
    if width.isdecimal() and int(width) > 1 and repository.decoupled(TENSORRT_LLM):
        text = f"is {width} while decoupled is true: beam search cannot be combined with streaming"
        yield Finding(file, "max_beam_width", text)


def _check_tokenizers(repository: _Repository) -> Iterator[Finding]:
    """All three models must hold the same tokenizer; a difference shows as wrong text, not as an error."""
    digests: dict[str, str] = {}
    for model in _WITH_TOKENIZER:
        if model not in repository.configs:
            continue
        folder = repository.version(model) / _parameter(repository.configs[model], "tokenizer_dir")
        if not _parameter(repository.configs[model], "tokenizer_dir") or not folder.is_dir():
            continue  # said by the check of the parameter
        if not (folder / "tokenizer.json").is_file():
            yield Finding(_file(model), "tokenizer_dir", f"{folder.name}/ has no tokenizer.json")
            continue
        content = hashlib.sha256()
        for path in sorted(folder.rglob("*")):
            if path.is_file():
                content.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
        digests[model] = content.hexdigest()
    for model, digest in digests.items():
        first = next(iter(digests))
        if digest != digests[first]:
            yield Finding(_file(model), "tokenizer_dir", f"holds another tokenizer than {first}")
