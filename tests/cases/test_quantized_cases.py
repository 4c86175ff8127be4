"""Cases of sources that are quantized already: what each layout has of them, and refusals before any weight."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lpxbuild.checkpoint import convert, read
from lpxbuild.checkpoint.unified import convert_unified
from lpxbuild.errors import SourceError
from lpxbuild.output import Output
from lpxbuild.quantization.scheme import Scheme
from lpxbuild.source import Source, check

if TYPE_CHECKING:
    from conftest import Case

DATA = Path(__file__).parent / "data"
NOW = {path.parent.name: json.loads(path.read_text()) for path in sorted(DATA.glob("*/now.json"))}
OUTCOMES = [(name, layout) for name in NOW for layout in ("tensorrt_llm", "unified_hf")]


def checked(folder: Path, layout: Any, scheme: Scheme | None = None) -> Source:
    return check(
        folder, origin=str(folder), layout=layout, scheme=scheme or Scheme(), need_tokenizer=True, output=Output.quiet()
    )


def named(outcome: str) -> list[tuple[str, str]]:
    return [(name, layout) for name, layout in OUTCOMES if NOW[name][layout]["outcome"] == outcome]


@pytest.mark.parametrize(("name", "layout"), named("refuses"))
def test_refused_with_cause_and_fix(name: str, layout: str) -> None:
    begun = time.monotonic()
    with pytest.raises(SourceError) as refusal:
        checked(DATA / name, layout)
    assert time.monotonic() - begun < 2
    found = str(refusal.value).lower()
    assert [group for group in NOW[name][layout]["notice"] if not any(word in found for word in group)] == []
    assert refusal.value.next


@pytest.mark.parametrize(("name", "layout"), named("converts"))
def test_converts_as_it_says_now(name: str, layout: str, load_case: Callable[[str], Case], tmp_path: Path) -> None:
    source = checked(DATA / name, layout)
    assert source.quantization is not None
    expected, dtype = NOW[name][layout], load_case(name).expected["recipe"]["dtype"]
    assert source.quantization.format == expected["format"]
    if layout == "unified_hf":
        convert_unified(source, tmp_path / "c", dtype=dtype, backend="vllm", output=Output.quiet())
        assert list(source.quantization.loaders) == expected["loaders"]
        for file in ("config.json", "model.safetensors"):
            assert (tmp_path / "c" / file).read_bytes() == (DATA / name / file).read_bytes()
        return
    convert(source, tmp_path / "c", dtype=dtype, output=Output.quiet())
    config = read(tmp_path / "c").config
    for key, value in expected["config"].items():
        assert {inner: config[key][inner] for inner in value} == value


@pytest.mark.parametrize("layout", ["tensorrt_llm", "unified_hf"])
@pytest.mark.parametrize("name", ["source_awq", "source_compressed_tensors"])
@pytest.mark.parametrize("format", ["int8_wo", "fp8", "int4_wo"])
def test_another_quantization_on_top_is_refused(name: str, layout: str, format: str) -> None:
    with pytest.raises(SourceError, match="already quantized") as refusal:
        checked(DATA / name, layout, Scheme(format))
    assert format in refusal.value.what
    assert "none" in refusal.value.next


REFUSED = {
    "second quantization": ("source_awq", "unified_hf", Scheme("int8_wo"), {}),
    "zero points": ("source_awq", "tensorrt_llm", Scheme(), {}),
    "another method": ("source_bnb", "unified_hf", Scheme(), {}),
    "order of activations": (
        "source_awq",
        "unified_hf",
        Scheme(),
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True},
    ),
    "KV cache": ("source_compressed_tensors", "tensorrt_llm", Scheme(kv_cache="fp8"), {}),
    "exceptions": ("source_compressed_tensors", "tensorrt_llm", Scheme(exclude=("*.o_proj",)), {}),
}


@pytest.mark.parametrize("reason", REFUSED)
def test_refused_without_the_weights(reason: str, tmp_path: Path) -> None:
    """The same refusal comes where the weight files cannot even be opened: nothing of them is needed for it."""
    name, layout, scheme, settings = REFUSED[reason]
    shutil.copytree(DATA / name, tmp_path / "source")
    weights = tmp_path / "source" / "model.safetensors"
    weights.unlink()
    weights.symlink_to(tmp_path / "nowhere")
    if settings:
        path = tmp_path / "source" / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": settings}))
    begun = time.monotonic()
    with pytest.raises(SourceError, match="already quantized"):
        checked(tmp_path / "source", layout, scheme)
    assert time.monotonic() - begun < 2


def read_by_this_process() -> int:
    """Bytes that this process has asked the kernel for by read()."""
    return int(Path("/proc/self/io").read_text().split()[1])


def test_the_headers_of_a_huge_source_are_enough(tmp_path: Path) -> None:
    """A 35 GB source of holes, an axis wrong in its last layer: refused in no time, nothing but headers read."""
    folder = tmp_path / "source"
    shutil.copytree(DATA / "source_compressed_tensors", folder)
    config = json.loads((folder / "config.json").read_text())
    layers, hidden, middle = 80, 8192, 28672
    config |= {"num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": middle}
    config |= {"num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128}
    (folder / "config.json").write_text(json.dumps(config))
    sizes = {
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (1024, hidden),
        "self_attn.v_proj": (1024, hidden),
    }
    sizes |= {"self_attn.o_proj": (hidden, hidden), "mlp.gate_proj": (middle, hidden), "mlp.up_proj": (middle, hidden)}
    sizes |= {"mlp.down_proj": (hidden, middle)}
    tensors: list[tuple[str, str, tuple[int, ...]]] = [
        ("model.embed_tokens.weight", "BF16", (320, hidden)),
        ("model.norm.weight", "BF16", (hidden,)),
    ]
    for layer in range(layers):
        tensors += [
            (f"model.layers.{layer}.{norm}.weight", "BF16", (hidden,))
            for norm in ("input_layernorm", "post_attention_layernorm")
        ]
        for module, (out, into) in sizes.items():
            full = f"model.layers.{layer}.{module}"
            wrong = layer == layers - 1 and module == "mlp.down_proj"
            tensors += [
                (f"{full}.weight_packed", "I32", (out, into // 8 - wrong)),
                (f"{full}.weight_scale", "BF16", (out, 1)),
                (f"{full}.weight_shape", "I64", (2,)),
            ]
    write_hollow(folder / "model.safetensors", tensors)
    before, begun = read_by_this_process(), time.monotonic()
    with pytest.raises(SourceError) as refusal:
        checked(folder, "tensorrt_llm")
    assert time.monotonic() - begun < 2
    assert read_by_this_process() - before < 4 << 20
    assert "model.layers.79.mlp.down_proj.weight_packed" in refusal.value.what
    assert "[8192, 3583]" in refusal.value.what
    assert "[8192, 3584]" in refusal.value.what


def write_hollow(file: Path, tensors: list[tuple[str, str, tuple[int, ...]]]) -> None:
    """A safetensors file of the right size whose data is a hole."""
    width = {"BF16": 2, "I32": 4, "I64": 8}
    header: dict[str, Any] = {}
    at = 0
    for name, dtype, shape in tensors:
        count = shape[0] * (shape[1] if len(shape) > 1 else 1) * width[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + count]}
        at += count
    text = json.dumps(header).encode()
    with file.open("wb") as target:
        target.write(len(text).to_bytes(8, "little") + text)
        target.truncate(8 + len(text) + at)
