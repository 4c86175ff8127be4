"""The stage `checkpoint` of a build: the layout that the backend reads, and what it has no field for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from lpxbuild.errors import SourceError
from lpxbuild.families.window import SLIDING
from lpxbuild.pipeline.stages import Work, plain

if TYPE_CHECKING:
    from lpxbuild.families import ModelShape
    from lpxbuild.recipe import Recipe


def inputs(recipe: Recipe, _base: Path) -> dict[str, str]:
    """A unified checkpoint of a quantized source is written for the backend that loads it."""
    return {"loader": recipe.backend} if recipe.checkpoint_layout == "unified_hf" else {}


def run_stage(work: Work, destination: Path) -> dict[str, Any]:
    """Write the checkpoint."""
    from lpxbuild import checkpoint
    from lpxbuild.quantization.calibrated import read_calibration
    from lpxbuild.quantization.scheme import Scheme

    recipe = work.recipe
    scheme = Scheme.of(recipe.quantization)
    calibrated = work.paths.get("calibration") if work.source().quantization is None else None
    calibration = read_calibration(calibrated) if calibrated is not None else None
    if recipe.checkpoint_layout == "unified_hf":
        from lpxbuild.checkpoint.unified import convert_unified

        return plain(
            convert_unified(
                work.source(),
                destination,
                dtype=recipe.model.dtype,
                scheme=scheme,
                calibration=calibration,
                backend=recipe.backend,
                output=work.output,
            )
        )
    for notice in runtime_notices(work.source().shape):
        work.output.notice(notice)
    report = checkpoint.convert(
        work.source(),
        destination,
        dtype=recipe.model.dtype,
        scheme=scheme,
        calibration=calibration,
        tensor_parallel=recipe.parallel.tensor,
        pipeline_parallel=recipe.parallel.pipeline,
        output=work.output,
    )
    return plain(report)


def runtime_notices(shape: ModelShape) -> list[str]:
    """What TensorRT-LLM's runtime must be told: the checkpoint has no field for it that the runtime reads."""
    notices = []
    if shape.sliding_window is not None:
        kinds = shape.layer_types or (SLIDING,) * shape.num_hidden_layers
        windows = kinds.count(SLIDING)
        some = "" if windows == len(kinds) else f" in {windows} of {len(kinds)} layers (a list, one value for each)"
        notices.append(
            f"checkpoint: the attention window of {shape.sliding_window} tokens{some} is no part of a TensorRT-LLM "
            "checkpoint: give its runtime max_attention_window; backend openvino has the window by itself"
        )
    longest = plain_rope(shape)
    if longest is not None:
        notices.append(
            f"checkpoint: the model's dynamic RoPE is no part of a TensorRT-LLM checkpoint, which is right up to "
            f"{longest} tokens: give its builder no larger max_seq_len"
        )
    return notices


def plain_rope(shape: ModelShape) -> int | None:
    """Tokens up to which dynamic RoPE is plain RoPE; None where it is not dynamic."""
    scaling = shape.rotary_scaling or {}
    return int(scaling["original_max_position_embeddings"]) if scaling.get("rope_type") == "dynamic" else None


def check_rope(shape: ModelShape, max_seq_len: int) -> None:
    """Refuse a length that needs RoPE which a TensorRT-LLM checkpoint cannot say.

    Raises:
        SourceError: names both lengths.
    """
    longest = plain_rope(shape)
    if longest is not None and max_seq_len > longest:
        raise SourceError(
            f"limits.max_seq_len {max_seq_len} is beyond the {longest} tokens up to which the model's RoPE is plain",
            why="rope_scaling of its config.json is dynamic: another base for each length beyond, for which a "
            "TensorRT-LLM checkpoint has no field (its own `dynamic` is another kind)",
            next=f"set limits.max_seq_len to at most {longest}",
        )
