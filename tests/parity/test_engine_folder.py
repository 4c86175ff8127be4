"""What is in an engine folder, and what the engine refuses before or while it compiles."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from lpxbuild import checkpoint, source
from lpxbuild.engine import check_features, check_positions, compile_engine
from lpxbuild.engine.openvino.rope import frequencies
from lpxbuild.errors import HostError, LpxError, RecipeError, SourceError
from lpxbuild.families import family_named
from lpxbuild.output import Output

CASES = Path(__file__).parents[1] / "cases" / "data"


@dataclass(frozen=True)
class Sizes:
    """The recipe's `limits` and `runtime` in one."""

    max_batch_size: int = 4
    max_input_len: int = 64
    max_seq_len: int = 96
    max_num_tokens: int = 48
    max_beam_width: int = 1
    precision: str = "exact"
    threads: int | None = None
    kv_cache_bytes: int = 1 << 20
    enable_kv_cache_reuse: bool = True
    enable_chunked_context: bool = True


@pytest.fixture(scope="module")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The baseline case at two ranks, with its tokenizer."""
    folder = tmp_path_factory.mktemp("checkpoint")
    case = CASES / "baseline_tp2"
    checked = source.check(case, origin=str(case), tensor_parallel=2, output=Output.quiet())
    checkpoint.convert(checked, folder, dtype="auto", tensor_parallel=2, output=Output.quiet())
    return folder


def compiled(checkpoint_folder: Path, target: Path, sizes: Sizes, output: Output | None = None) -> dict[str, object]:
    target.mkdir()
    compile_engine("openvino", checkpoint_folder, target, limits=sizes, runtime=sizes, output=output or Output.quiet())
    engine: dict[str, object] = json.loads((target / "engine.json").read_text())
    return engine


def test_engine_folder(tiny_checkpoint: Path, tmp_path: Path) -> None:
    folder = tmp_path / "engine"
    engine = compiled(tiny_checkpoint, folder, Sizes())
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "engine.json",
        "generation_config.json",
        "openvino_model.bin",
        "openvino_model.xml",
        "tokenizer",
    ]
    assert (folder / "tokenizer" / "tokenizer.json").read_bytes() == (
        CASES / "baseline_tp2" / "tokenizer.json"
    ).read_bytes()
    assert engine["executor"] == "paged"
    assert engine["vocab_size"] == 320
    assert engine["limits"] == {
        "max_batch_size": 4,
        "max_input_len": 64,
        "max_seq_len": 96,
        "max_beam_width": 1,
        "max_num_tokens": 48,
    }
    # 2 layers × (keys, values) × 2 KV heads × 16 numbers × 32 tokens × 4 bytes = 16 KiB a block.
    config = json.loads((CASES / "baseline_tp2" / "config.json").read_text())
    head = config["hidden_size"] // config["num_attention_heads"]
    block = config["num_hidden_layers"] * 2 * config["num_key_value_heads"] * head * 32 * 4
    assert engine["scheduler"] == {
        "cache_size_bytes": 1 << 20,
        "num_kv_blocks": (1 << 20) // block,
        "max_num_batched_tokens": 48,
        "max_num_seqs": 4,
        "dynamic_split_fuse": True,
        "enable_prefix_caching": True,
    }
    assert engine["properties"] == {
        "INFERENCE_PRECISION_HINT": "f32",
        "KV_CACHE_PRECISION": "f32",
        "DYNAMIC_QUANTIZATION_GROUP_SIZE": 0,
    }
    assert engine["checkpoint"] == {
        name: hashlib.sha256((tiny_checkpoint / name).read_bytes()).hexdigest()
        for name in ("rank0.safetensors", "rank1.safetensors")
    }


def test_threads_reach_the_properties(tiny_checkpoint: Path, tmp_path: Path) -> None:
    engine = compiled(tiny_checkpoint, tmp_path / "engine", Sizes(threads=1))
    assert engine["properties"]["INFERENCE_NUM_THREADS"] == 1  # type: ignore[index]


def test_only_vocabulary_columns_are_computed(tmp_path: Path) -> None:
    """321 tokens over two ranks: the padding row is in the rank files and not in the graph."""
    import openvino as ov

    case = CASES / "vocab_odd_tp2"
    checked = source.check(case, origin=str(case), tensor_parallel=2, output=Output.quiet())
    (tmp_path / "checkpoint").mkdir()
    checkpoint.convert(checked, tmp_path / "checkpoint", dtype="auto", tensor_parallel=2, output=Output.quiet())
    compiled(tmp_path / "checkpoint", tmp_path / "engine", Sizes())
    model = ov.Core().read_model(tmp_path / "engine" / "openvino_model.xml")
    assert model.output("logits").get_partial_shape()[2].get_length() == 321


def test_a_cache_too_small_for_one_request_is_refused(tiny_checkpoint: Path, tmp_path: Path) -> None:
    with pytest.raises(RecipeError) as caught:
        compiled(tiny_checkpoint, tmp_path / "engine", Sizes(kv_cache_bytes=32 << 10))
    assert "max_seq_len 96" in caught.value.what
    # 96 tokens are three blocks and one to spare; a block of 32 tokens: 2 layers x K and V x 2 heads x 16 x 4 bytes.
    enough = float(re.search(r"kv_cache_gib to at least (\S+),", caught.value.next)[1])
    needed = 4 * 32 * 2 * 2 * 2 * 16 * 4 / 2**30
    assert needed <= enough <= 1.1 * needed


def test_a_length_beyond_the_positions_is_said(tiny_checkpoint: Path, tmp_path: Path) -> None:
    output = Output.quiet()
    compiled(tiny_checkpoint, tmp_path / "engine", Sizes(max_seq_len=160), output)
    assert any("max_seq_len 160" in notice and "128" in notice for notice in output.notices)


def test_a_missing_rank_file_is_named(tiny_checkpoint: Path, tmp_path: Path) -> None:
    broken = tmp_path / "checkpoint"
    broken.mkdir()
    for file in tiny_checkpoint.iterdir():
        if file.is_file() and file.name != "rank1.safetensors":
            (broken / file.name).write_bytes(file.read_bytes())
    with pytest.raises(LpxError, match=r"rank1\.safetensors"):
        compiled(broken, tmp_path / "engine", Sizes())


def test_a_length_beyond_learned_positions_is_refused() -> None:
    config = {"model_type": "gpt2", "n_embd": 64, "n_layer": 1, "n_head": 2, "n_positions": 1024, "vocab_size": 96}
    shape = family_named("gpt2").model_shape(config | {"architectures": ["GPT2LMHeadModel"], "torch_dtype": "float32"})
    check_positions(shape, 1024)
    with pytest.raises(RecipeError, match="1024 positions"):
        check_positions(shape, 1025)


def test_a_quantized_cache_is_said_not_to_be_executed() -> None:
    from lpxbuild.engine.openvino.compile import _notice_kv_cache

    output = Output.quiet()
    _notice_kv_cache({"quantization": {"kv_cache_quant_algo": "FP8"}}, output)
    assert "float32" in output.notices[0]
    assert "FP8" in output.notices[0]
    _notice_kv_cache({"quantization": {"kv_cache_quant_algo": None}}, output)
    assert len(output.notices) == 1


def test_without_openvino_the_extra_is_named(
    tiny_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from lpxbuild.engine.openvino import compile as module

    def absent(name: str) -> str:
        raise module.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(module.metadata, "version", absent)
    with pytest.raises(HostError) as caught:
        compiled(tiny_checkpoint, tmp_path / "engine", Sizes())
    assert "lpxbuild[embedded]" in caught.value.next


def test_attention_features() -> None:
    assert check_features((), "openvino") == "paged"
    assert check_features(("sliding_window", "mixed_layers"), "openvino") == "paged"
    assert check_features(("sliding_window", "mixed_layers", "two_rope_bases"), "openvino") == "paged"
    assert check_features(("sliding_window", "mixed_layers", "soft_cap"), "openvino") == "stateful"
    assert check_features(("alibi",), "openvino") == "stateful"
    with pytest.raises(SourceError, match="long_rope") as caught:
        check_features(("long_rope",), "openvino")
    assert "limits.max_seq_len" in caught.value.next
    with pytest.raises(SourceError, match="something_new"):
        check_features(("something_new",), "openvino")
    with pytest.raises(RecipeError, match="tensorrt"):
        check_features((), "tensorrt")


def test_attention_features_are_named_where_one_looks(tmp_path: Path) -> None:
    """Engine, manifest and `lpx inspect` say that a window is at work."""
    from lpxbuild.pipeline import build
    from lpxbuild.pipeline.inspection import inspect_path
    from lpxbuild.recipe import Recipe

    recipe = tmp_path / "windowed.yaml"
    case = CASES / "sliding_window_mistral"
    limits = "{max_batch_size: 2, max_input_len: 48, max_seq_len: 64, max_num_tokens: 64}"
    recipe.write_text(
        f"name: windowed\nmodel: {{source: {case}}}\nbackend: openvino\nlimits: {limits}\n"
        "runtime: {kv_cache_gib: 0.01}\n"
    )
    output = Output.quiet()
    folders = {"cache_dir": tmp_path / "cache", "build_dir": tmp_path / "build"}
    result = build(Recipe.load(recipe), recipe_path=recipe, to="engine", output=output, **folders)
    manifest = json.loads((result.path / "manifest.json").read_text())
    assert manifest["stages"]["engine"]["report"]["attention_features"] == ["sliding_window"]
    assert inspect_path(result.path, output=output).data["attention_features"] == ["sliding_window"]
    assert inspect_path(result.path / "engine", output=output).data["engine"]["attention_features"] == [
        "sliding_window"
    ]


def test_rotary_frequencies_by_hand() -> None:
    plain, factor = frequencies(4, 10000.0, None, 128)
    assert plain.tolist() == pytest.approx([1.0, 0.01])
    assert factor == 1.0
    linear, _ = frequencies(4, 10000.0, {"type": "linear", "factor": 4.0}, 128)
    assert linear.tolist() == pytest.approx([0.25, 0.0025])
    # llama3 with original length 32: wavelength 2π stays (shorter than 32/4), 2π·100 is divided (longer than 32/1).
    llama3 = {"type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled, _ = frequencies(4, 10000.0, {**llama3, "original_max_position_embeddings": 32}, 128)
    assert scaled.tolist() == pytest.approx([1.0, 0.01 / 8])
    _, magnitude = frequencies(4, 10000.0, {"type": "yarn", "factor": 4.0}, 128)
    assert magnitude == pytest.approx(0.1 * math.log(4.0) + 1.0)
    # The checkpoint's way to say attention_factor 1.5 and 1: mscale with mscale_all_dim 0.
    for wanted in (1.5, 1.0):
        numbers = {"mscale": (wanted - 1.0) / (0.1 * math.log(4.0)), "mscale_all_dim": 0.0}
        _, magnitude = frequencies(4, 10000.0, {"type": "yarn", "factor": 4.0, **numbers}, 128)
        assert magnitude == pytest.approx(wanted, rel=1e-12)
    with pytest.raises(SourceError, match="martian"):
        frequencies(4, 10000.0, {"type": "martian"}, 128)


def test_long_positions_keep_their_angles() -> None:
    """cos and sin of the graph at far positions against float64: the float32 angle is all that is rounded."""
    import openvino as ov
    from openvino import opset13 as op

    inverse, _ = frequencies(64, 500000.0, None, 131072)
    positions = np.array([0, 1, 4095, 32767, 131071], np.int64)
    parameter = op.parameter(ov.PartialShape([5]), ov.Type.i64)
    angles = op.multiply(op.unsqueeze(op.convert(parameter, ov.Type.f32), np.int64(1)), op.constant(inverse[None]))
    model = ov.Model([op.cos(angles), op.sin(angles)], [parameter])
    request = ov.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
    computed = request.infer([positions])
    exact = (positions[:, None].astype(np.float32) * inverse[None]).astype(np.float64)
    assert np.abs(computed[0] - np.cos(exact)).max() < 1e-5
    assert np.abs(computed[1] - np.sin(exact)).max() < 1e-5


def test_compiling_leaves_no_scratch(tiny_checkpoint: Path, tmp_path: Path) -> None:
    compiled(tiny_checkpoint, tmp_path / "engine", Sizes(precision="fast"))
    assert not [path for path in (tmp_path / "engine").iterdir() if path.name.startswith("tmp")]


def test_compiling_writes_nothing_into_the_home_folder(tiny_checkpoint: Path, tmp_path: Path) -> None:
    """OpenVINO's telemetry would leave an `intel` folder there."""
    home = tmp_path / "home"
    home.mkdir()
    (tmp_path / "engine").mkdir()
    script = f"""
from pathlib import Path
from types import SimpleNamespace
from lpxbuild.engine import compile_engine
from lpxbuild.output import Output
sizes = SimpleNamespace(**{vars(Sizes())!r})
compile_engine("openvino", Path({str(tiny_checkpoint)!r}), Path({str(tmp_path / "engine")!r}), limits=sizes,
               runtime=sizes, output=Output.quiet())
"""
    environment = {**os.environ, "HOME": str(home)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "engine" / "engine.json").exists()
    assert list(home.iterdir()) == []


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    """130 MB of float32 weights over two ranks, joined and saved, take far less anonymous memory than they are."""
    from safetensors.numpy import save_file

    model = tmp_path / "model"
    model.mkdir()
    config = json.loads((CASES / "baseline" / "config.json").read_text())
    config |= {"vocab_size": 64000, "hidden_size": 256, "torch_dtype": "float32", "tie_word_embeddings": False}
    config |= {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1}
    (model / "config.json").write_text(json.dumps(config))
    inner, hidden = config["intermediate_size"], 256
    shapes = {"self_attn.q_proj": (256, hidden), "self_attn.k_proj": (128, hidden), "self_attn.v_proj": (128, hidden)}
    shapes |= {"self_attn.o_proj": (hidden, 256), "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden)}
    shapes |= {"mlp.down_proj": (hidden, inner), "input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    tensors = {f"model.layers.0.{name}.weight": np.ones(shape, np.float32) for name, shape in shapes.items()}
    tensors |= {"model.norm.weight": np.ones(hidden, np.float32)}
    tensors |= {"model.embed_tokens.weight": np.ones((64000, hidden), np.float32)}
    tensors |= {"lm_head.weight": np.zeros((64000, hidden), np.float32)}
    save_file(tensors, model / "model.safetensors")
    checked = source.check(model, origin="model", need_tokenizer=False, tensor_parallel=2, output=Output.quiet())
    for name in ("checkpoint", "engine"):
        (tmp_path / name).mkdir()
    checkpoint.convert(checked, tmp_path / "checkpoint", dtype="float32", tensor_parallel=2, output=Output.quiet())
    script = f"""
import threading
from pathlib import Path
from types import SimpleNamespace
import openvino, openvino.opset13
from lpxbuild.engine import compile_engine
from lpxbuild.output import Output
def anonymous():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return int(line.split()[1]) // 1024
done, peak = threading.Event(), [0]
def watch():
    while not done.wait(0.002):
        peak[0] = max(peak[0], anonymous())
before = anonymous()
watcher = threading.Thread(target=watch, daemon=True)
watcher.start()
sizes = SimpleNamespace(**{vars(Sizes())!r})
compile_engine("openvino", Path({str(tmp_path / "checkpoint")!r}), Path({str(tmp_path / "engine")!r}), limits=sizes,
               runtime=sizes, output=Output.quiet())
done.set()
watcher.join()
print(peak[0] - before)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "engine" / "openvino_model.bin").stat().st_size > 130e6
    assert int(done.stdout) < 60
