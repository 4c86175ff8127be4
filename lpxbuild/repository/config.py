"""config.pbtxt as protobuf messages: built from the tables, printed with protobuf's own text format, parsed back."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpxbuild.repository.parameters import PARAMETERS
from lpxbuild.repository.settings import BACKENDS, RepositorySettings
from lpxbuild.repository.tensors import (
    BLS,
    ENSEMBLE,
    POSTPROCESSING,
    PREPROCESSING,
    TENSORRT_LLM,
    Tensor,
    ensemble_steps,
    interface,
)

if TYPE_CHECKING:
    ModelConfig = Any  # tritonclient ships no types

CONFIG_FILE = "config.pbtxt"


def build_config(model: str, settings: RepositorySettings) -> ModelConfig:
    """The configuration of one model of the repository, as Triton's ModelConfig message."""
    from tritonclient.grpc import model_config_pb2

    config = model_config_pb2.ModelConfig(name=model, max_batch_size=settings.max_batch_size)
    if model == ENSEMBLE:
        config.platform = "ensemble"
    else:
        config.backend = BACKENDS[settings.backend].triton_backend if model == TENSORRT_LLM else "python"
    if model in (TENSORRT_LLM, BLS):
        config.model_transaction_policy.decoupled = settings.decoupled
    if model in (PREPROCESSING, TENSORRT_LLM):
        config.dynamic_batching.preferred_batch_size.append(settings.max_batch_size)
        config.dynamic_batching.max_queue_delay_microseconds = settings.max_queue_delay_microseconds
        config.dynamic_batching.default_queue_policy.max_queue_size = settings.max_queue_size
    elif model == POSTPROCESSING:
        # Several instances finish in any order, and the ensemble sends what comes: without this a stream's pieces
        # change places (Triton 2.51, three instances, three streams of 60 tokens: 74 of 240 streams wrong, with it 0).
        config.dynamic_batching.preserve_ordering = True
    tensors = interface(model, settings.backend)
    for tensor in tensors.inputs:
        _fill(config.input.add(), tensor)
    for tensor in tensors.outputs:
        _fill(config.output.add(), tensor)
    for parameter in PARAMETERS[model]:
        config.parameters[parameter.key].string_value = parameter.value(settings)
    if model == ENSEMBLE:
        for step in ensemble_steps(settings.backend):
            entry = config.ensemble_scheduling.step.add(model_name=step.model, model_version=-1)
            entry.input_map.update(step.inputs)
            entry.output_map.update(step.outputs)
    else:
        group = config.instance_group.add(count=settings.instances(model))
        group.kind = model_config_pb2.ModelInstanceGroup.KIND_CPU
    return config


def config_text(config: ModelConfig) -> str:
    """The text form; the same bytes for the same message (map entries are sorted by key)."""
    from google.protobuf import text_format

    text: str = text_format.MessageToString(config, as_utf8=True)
    return text


def parse_config(path: Path) -> ModelConfig:
    """Read a config.pbtxt with Triton's own schema.

    Raises:
        google.protobuf.text_format.ParseError: naming line and column.
    """
    from google.protobuf import text_format
    from tritonclient.grpc import model_config_pb2

    return text_format.Parse(path.read_text(encoding="utf-8"), model_config_pb2.ModelConfig())


def read_tensor(message: Any) -> Tensor:
    """A ModelInput or ModelOutput message as a Tensor; outputs are never optional or ragged."""
    from tritonclient.grpc import model_config_pb2

    return Tensor(
        name=message.name,
        data_type=model_config_pb2.DataType.Name(message.data_type).removeprefix("TYPE_"),
        dims=tuple(message.dims),
        optional=getattr(message, "optional", False),
        reshape=tuple(message.reshape.shape) if message.HasField("reshape") else None,
        ragged=getattr(message, "allow_ragged_batch", False),
    )


def _fill(message: Any, tensor: Tensor) -> None:
    from tritonclient.grpc import model_config_pb2

    message.name = tensor.name
    message.data_type = model_config_pb2.DataType.Value(f"TYPE_{tensor.data_type}")
    message.dims.extend(tensor.dims)
    if tensor.reshape is not None:
        # An empty reshape must still be present: it makes a scalar per batch row.
        message.reshape.SetInParent()
        message.reshape.shape.extend(tensor.reshape)
    if tensor.optional:
        message.optional = True
    if tensor.ragged:
        message.allow_ragged_batch = True
