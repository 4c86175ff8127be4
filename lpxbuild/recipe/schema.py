"""The recipe's keys: strict pydantic models, each key read by some stage.

Unknown keys, quoted numbers ("8") and booleans in place of numbers are errors; `loading` turns them into
messages with file, line and the nearest valid key.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Format = Literal[
    "none",
    "int8_wo",
    "int4_wo",
    "int4_rtn",
    "int4_awq",
    "w4a8_awq",
    "int8_sq",
    "fp8",
    "fp8_pc_pt",
    "nvfp4",
    "w4a16_nvfp4",
]
Backend = Literal["openvino", "tensorrt", "pytorch", "vllm"]
DType = Literal["auto", "float32", "bfloat16", "float16"]

LARGEST = 2**31 - 1
"""Triton's and TensorRT-LLM's numbers are INT32."""

Count = Annotated[int, Field(ge=1, le=LARGEST)]
"""A whole number of at least 1."""


class Section(BaseModel):
    """Base of every part of a recipe: no unknown keys, no type guessing, immutable."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class Model(Section):
    """The model to build from."""

    source: str = Field(
        min_length=1,
        description="Hugging Face id (`org/name`), local folder, local `.gguf` file, or "
        "`python-package:NAME/FILE` for a file inside an installed Python package. Paths are relative to the recipe.",
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit on the hub; the commit it stood for goes into recipe.lock."
    )
    dtype: DType = Field("auto", description="Element type of the checkpoint; `auto` keeps the source's.")


class Calibration(Section):
    """Text that is run through the model to find the scales of activations and KV cache."""

    dataset: str = Field(
        "builtin",
        min_length=1,
        description="`builtin` (a small text set inside the package), a local `.txt`, `.jsonl` or `.parquet` file "
        "(relative to the recipe), or a Hugging Face dataset id (`org/name`).",
    )
    split: str = Field("train", min_length=1, description="Split of a Hugging Face dataset.")
    column: str = Field("text", min_length=1, description="Field of a `.jsonl`, `.parquet` or Hugging Face dataset.")
    samples: Count = Field(128, description="Texts that are used, chosen by `seed`.")
    sequence_length: Count = Field(512, description="Longest text in tokens; what is longer is cut.")
    seed: Annotated[int, Field(ge=0, le=LARGEST)] = Field(0, description="Chooses the texts and their order.")
    device: str = Field(
        "cpu", pattern=r"^(cpu|cuda(:\d+)?)$", description="Where the model runs: `cpu`, `cuda`, `cuda:1`."
    )


class Quantization(Section):
    """How weights and KV cache are stored."""

    format: Format = Field("none", description="Quantization format, named as ModelOpt's `qformat`.")
    kv_cache: Literal["none", "int8", "fp8"] = Field(
        "none",
        description="Quantization of the KV cache. `int8` needs calibration, and so does `fp8` of backends `pytorch` "
        "and `vllm`; for `tensorrt` and `openvino`, where nothing else is calibrated and `calibration` is not given, "
        "the scales of `fp8` are 1.0.",
    )
    group_size: Literal[64, 128] = Field(
        128, description="Input features that share a scale, of `int4_rtn`, `int4_awq` and `w4a8_awq`."
    )
    exclude: list[Annotated[str, Field(min_length=1)]] = Field(
        [],
        description="Linear layers that stay unquantized: patterns (`*`, `?`) of Hugging Face module names, as "
        "`model.layers.0.mlp.down_proj` or `*.mlp.*`.",
    )
    overrides: dict[Annotated[str, Field(min_length=1)], Format] = Field(
        {}, description="Another format for some linear layers: pattern of Hugging Face module names → format."
    )
    calibration: Calibration = Field(
        Calibration(),
        description="Text for the formats that need calibration. Given (`{}` will do), it also measures an FP8 KV "
        "cache that could do without.",
    )


class Parallel(Section):
    """How many ranks the checkpoint is written for."""

    tensor: Count = Field(1, description="Tensor parallel size.")
    pipeline: Count = Field(1, description="Pipeline parallel size.")


class Limits(Section):
    """Sizes that the engine enforces."""

    max_batch_size: Count = Field(8, description="Requests that run at the same time.")
    max_input_len: Count = Field(1024, description="Longest prompt, in tokens.")
    max_seq_len: Count = Field(2048, description="Longest prompt and answer together, in tokens.")
    max_num_tokens: Count = Field(512, description="Tokens computed in one step over all requests.")
    max_beam_width: Count = Field(1, description="Widest beam search a request may ask for.")
    max_queue_size: Annotated[int, Field(ge=0, le=LARGEST)] = Field(
        0, description="Requests waiting in Triton before new ones are rejected; 0 = no bound."
    )

    @model_validator(mode="after")
    def _fit(self) -> Limits:
        if self.max_input_len > self.max_seq_len:
            raise ValueError(
                f"max_input_len {self.max_input_len} is larger than max_seq_len {self.max_seq_len}; max_seq_len counts "
                f"prompt and answer together, so it must be at least max_input_len + the longest answer"
            )
        return self


class Runtime(Section):
    """How the engine executes."""

    precision: Literal["exact", "fast"] = Field(
        "exact",
        description="Arithmetic of the embedded engine: `exact` = float32 throughout, for proof; "
        "`fast` = int8 weights with dynamic quantization, for serving.",
    )
    threads: Count | None = Field(None, description="CPU threads of the embedded engine; default: all cores.")
    kv_cache_gib: Annotated[float, Field(gt=0, le=65536, allow_inf_nan=False)] = Field(
        1.0, description="Size of the paged KV cache in GiB."
    )
    enable_kv_cache_reuse: bool = Field(True, description="Share KV blocks of equal prompt beginnings.")
    enable_chunked_context: bool = Field(True, description="Compute long prompts in pieces of max_num_tokens.")
    python: str | None = Field(
        None,
        description="Interpreter that runs the engine host; default: the first `python3` in the server's PATH.",
    )
    reference_python: str | None = Field(
        None,
        description="Interpreter that has torch and transformers (extra `verify`) and ModelOpt (extra `calibrate`); "
        "default: lpx's own. A relative path starts from the recipe.",
    )

    @property
    def kv_cache_bytes(self) -> int:
        """Size of the paged KV cache in bytes."""
        return int(self.kv_cache_gib * (1 << 30))


class Instances(Section):
    """Triton instances (processes) per model."""

    preprocessing: Count = Field(1, description="Instances of the tokenizing model.")
    postprocessing: Count = Field(1, description="Instances of the detokenizing model.")
    tensorrt_llm: Count = Field(1, description="Instances that connect to the one engine host.")
    tensorrt_llm_bls: Count = Field(1, description="Instances of the BLS model = requests it serves at a time.")


class Warmup(Section):
    """Work done before the server is announced as ready."""

    prompts: Count = Field(1, description="Generations run through the ensemble before ready.")


class Serve(Section):
    """The Triton repository and the server."""

    streaming: bool = Field(True, description="Decoupled mode: several responses per request, over gRPC streams.")
    bls: bool = Field(True, description="Also render `tensorrt_llm_bls`.")
    add_special_tokens: bool = Field(True, description="Let the tokenizer add its special tokens (BOS) to text_input.")
    skip_special_tokens: bool = Field(True, description="Leave special tokens out of text_output.")
    max_queue_delay_microseconds: Annotated[int, Field(ge=0, le=LARGEST)] = Field(
        0, description="How long Triton waits to form a batch."
    )
    instances: Instances = Field(Instances(), description="Triton instances per model.")
    warmup: Warmup = Field(Warmup(), description="Work done before ready.")
    drain_seconds: Count = Field(30, description="Time that running requests get to finish at shut-down, in seconds.")


class Message(Section):
    """One chat message."""

    role: Literal["system", "user", "assistant"] = Field(description="Who speaks.")
    content: str = Field(description="What is said.")


class Prompt(Section):
    """A prompt of the smoke test: raw `text`, or `messages` for the model's chat template."""

    text: str | None = Field(None, min_length=1, description="Raw prompt text.")
    messages: list[Message] | None = Field(None, min_length=1, description="Chat messages.")
    max_tokens: Count = Field(32, description="Longest answer, in tokens.")
    expect: str | None = Field(None, min_length=1, description="Text that the greedy answer must contain.")

    @model_validator(mode="after")
    def _one_form(self) -> Prompt:
        if (self.text is None) == (self.messages is None):
            raise ValueError("give either `text` or `messages`, one of them")
        return self


class Smoke(Section):
    """What the smoke test asks beside its built-in checks."""

    prompts: list[Prompt] = Field(
        [Prompt(text="The capital of France is", max_tokens=16)], min_length=1, description="Prompts with expectations."
    )


class Thresholds(Section):
    """What a verdict is measured by; each default depends on the format (docs/verify.md)."""

    min_agreement: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None, description="Lowest share of tokens for which both models would say the same next token."
    )
    max_kl: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="Highest mean KL divergence of the next-token distributions, in nats."
    )
    max_perplexity_rise: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = Field(
        None, description="Highest relative rise of perplexity over the source: 0.02 = 2 %."
    )


class Verify(Section):
    """The numeric comparison of what was built with the source."""

    run: Literal["auto", "always", "never"] = Field(
        "auto",
        description="Part of `lpx build`: `auto` where the extra `verify` is installed and the model fits into memory, "
        "`always` (the build is refused where it cannot run), `never`.",
    )
    required: bool = Field(False, description="The build counts as proven only with a verify that passed.")
    text: str = Field(
        "builtin",
        min_length=1,
        description="Text for perplexity: `builtin` or a local `.txt` file (beside the recipe).",
    )
    tokens: Count = Field(1024, description="Tokens of that text that are compared.")
    prompts: list[Annotated[str, Field(min_length=1)]] = Field(
        ["The capital of France is", "Water boils at a temperature of"],
        description="Prompts whose greedy answers are shown side by side.",
    )
    warn: Thresholds = Field(Thresholds(), description="Beyond these: a warning.")
    fail: Thresholds = Field(Thresholds(), description="Beyond these: the verdict is negative.")


class Recipe(Section):
    """One recipe = one checkpoint = one engine = one Triton repository."""

    name: str = Field(
        pattern=r"^[a-z0-9][a-z0-9._-]*$", max_length=100, description="Name of the build folder: `build/NAME`."
    )
    model: Model
    backend: Backend = Field("openvino", description="Executes the engine.")
    quantization: Quantization = Field(Quantization(), description="How weights and KV cache are stored.")
    parallel: Parallel = Field(Parallel(), description="Ranks of the checkpoint.")
    limits: Limits = Field(Limits(), description="Sizes that the engine enforces.")
    runtime: Runtime = Field(Runtime(), description="How the engine executes.")
    serve: Serve = Field(Serve(), description="The Triton repository and the server.")
    smoke: Smoke = Field(Smoke(), description="What the smoke test asks.")
    verify: Verify = Field(Verify(), description="The numeric comparison with the source.")

    @property
    def checkpoint_layout(self) -> Literal["tensorrt_llm", "unified_hf"]:
        """The layout that the backend reads."""
        return "unified_hf" if self.backend in ("pytorch", "vllm") else "tensorrt_llm"

    @model_validator(mode="after")
    def _together(self) -> Recipe:
        if self.verify.required and self.verify.run == "never":
            raise ValueError("verify.required true and verify.run never contradict each other; set verify.run: always")
        if self.serve.streaming and self.limits.max_beam_width > 1:
            raise ValueError(
                f"limits.max_beam_width {self.limits.max_beam_width} cannot be combined with serve.streaming true: "
                f"beam search returns whole sequences; set serve.streaming: false or max_beam_width: 1"
            )
        if not self.runtime.enable_chunked_context and self.limits.max_num_tokens < self.limits.max_input_len:
            raise ValueError(
                f"limits.max_num_tokens {self.limits.max_num_tokens} is smaller than max_input_len "
                f"{self.limits.max_input_len} while runtime.enable_chunked_context is false: a long prompt would never "
                f"fit into a step; enable chunked context or raise max_num_tokens"
            )
        return self

    @classmethod
    def load(cls, path: Path | str, overrides: list[str] | None = None) -> Recipe:
        """Read a recipe file.

        Args:
            path: the YAML file.
            overrides: `key.path=value` texts, as `--set` takes them.

        Raises:
            RecipeError: naming file, line, what was found, and the nearest valid key.
        """
        from lpxbuild.recipe.loading import load

        return load(Path(path), overrides or [])
