"""Small GGUF files made here: vocabularies, biases, rope factors and float types that SmolLM2's file does not have."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lpxbuild.errors import HostError, SourceError
from lpxbuild.output import Output
from lpxbuild.source import fetch
from lpxbuild.source.gguf.rope import llama3_factors

sys.path.insert(0, str(Path(__file__).parent))
from gguf_files import (  # isort: skip
    CORPUS,
    LINES,
    byte_level_vocabulary,
    converted,
    sentence_piece_vocabulary,
    sums_of,
    tokenizer_of,
    values,
)

ROOT = Path(__file__).parents[2]
REFERENCE_PYTHON = ROOT / ".venv-ref" / "bin" / "python"
HIDDEN, MLP, LAYERS, HEADS, KV_HEADS = 64, 96, 2, 4, 2


def write_gguf(
    path: Path, *, change: Callable | None = None, kind: str = "llama", float_type: str = "F32", **extra
) -> Path:
    """A random two-layer llama; `change(writer)` adds keys, `extra` changes the metadata below."""
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    settings = {
        "architecture": "llama",
        "pre": None,
        "biases": (),
        "head": True,
        "leave_out": (),
        "factors": None,
        **extra,
    }
    writer = GGUFWriter(path, settings["architecture"])
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(500000.0)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    tokens = sentence_piece_vocabulary(writer) if kind == "llama" else byte_level_vocabulary(writer, settings["pre"])
    if change is not None:
        change(writer)

    random = np.random.default_rng(3)
    qtype = GGMLQuantizationType[float_type]
    key_value = HIDDEN // HEADS * KV_HEADS
    shapes = {"attn_q": (HIDDEN, HIDDEN), "attn_k": (key_value, HIDDEN), "attn_v": (key_value, HIDDEN)}
    shapes |= {
        "attn_output": (HIDDEN, HIDDEN),
        "ffn_gate": (MLP, HIDDEN),
        "ffn_up": (MLP, HIDDEN),
        "ffn_down": (HIDDEN, MLP),
    }
    tensors = {"token_embd.weight": (len(tokens), HIDDEN), "output_norm.weight": (HIDDEN,)}
    if settings["head"]:
        tensors["output.weight"] = (len(tokens), HIDDEN)
    for layer in range(LAYERS):
        tensors |= {f"blk.{layer}.{name}.weight": shape for name, shape in shapes.items()}
        tensors |= {f"blk.{layer}.{name}.weight": (HIDDEN,) for name in ("attn_norm", "ffn_norm")}
        tensors |= {f"blk.{layer}.{name}.bias": shapes[name][:1] for name in settings["biases"]}
    for name, shape in tensors.items():
        if name in settings["leave_out"]:
            continue
        values = random.standard_normal(shape, dtype=np.float32)
        if len(shape) == 1:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quantize(values, qtype), raw_dtype=qtype)
    if settings["factors"] is not None:
        writer.add_tensor("rope_freqs.weight", np.array(settings["factors"], dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def add_longrope(writer) -> None:
    from gguf import RopeScalingType

    writer.add_rope_scaling_type(RopeScalingType.LONGROPE)
    writer.add_rope_scaling_factor(4.0)


@pytest.fixture(scope="module")
def against_transformers(tmp_path_factory):
    """(conversion, transformers' answer) for a SentencePiece file in Q8_0 and a byte-level one in F16."""
    work = tmp_path_factory.mktemp("small")
    (work / "lines.json").write_text(json.dumps(LINES))
    files = {
        "sentence_piece": write_gguf(work / "spm.gguf", float_type="Q8_0", head=False),
        "byte_level": write_gguf(work / "bpe.gguf", kind="gpt2", pre="gpt-2", float_type="F16"),
    }
    command = [REFERENCE_PYTHON, Path(__file__).with_name("gguf_reference.py"), work / "lines.json"]
    for name, file in files.items():
        command += [file, work / f"{name}.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: (converted(file), json.loads((work / f"{name}.json").read_text())) for name, file in files.items()}


@pytest.mark.parametrize("name", ["sentence_piece", "byte_level"])
def test_ids_are_those_of_transformers(against_transformers, name):
    source, theirs = against_transformers[name]
    tokenizer = tokenizer_of(source)
    assert [tokenizer.encode(line, add_special_tokens=False).ids for line in LINES] == theirs["ids"]


@pytest.mark.parametrize(("name", "dtype"), [("sentence_piece", "bfloat16"), ("byte_level", "float16")])
def test_weights_are_those_of_transformers(against_transformers, name, dtype):
    source, theirs = against_transformers[name]
    assert source.shape.dtype == dtype
    wanted = {key: digest for key, digest in theirs["sha256"].items() if key.endswith(f" {dtype}")}
    assert sums_of(source, dtype) == wanted


def test_a_sentence_piece_tokenizer_adds_bos_and_decodes(against_transformers):
    tokenizer = tokenizer_of(against_transformers["sentence_piece"][0])
    assert tokenizer.encode("the fox").ids[0] == 1
    for line in CORPUS:
        assert tokenizer.decode(tokenizer.encode(line).ids) == line


def test_numbers_are_the_shortest_that_read_back_equal(against_transformers):
    source, _ = against_transformers["byte_level"]
    text = (source.path / "config.json").read_text()
    assert '"rms_norm_eps": 1e-06,' in text
    assert '"rope_theta": 500000.0,' in text


def test_end_of_turn_ends_a_generation_too(against_transformers):
    source, _ = against_transformers["byte_level"]
    size = source.shape.vocab_size
    assert source.end_ids == (size - 3, size - 2)
    assert source.bos_id == size - 4
    assert source.pad_id == size - 3


def test_user_defined_tokens_are_kept_whole(against_transformers):
    source, _ = against_transformers["byte_level"]
    assert tokenizer_of(source).encode("<tool>").ids == [source.shape.vocab_size - 1]


def test_q_and_k_rows_go_back_to_their_halves(tmp_path):
    from gguf import GGUFReader

    file = write_gguf(tmp_path / "model.gguf")
    source = converted(file)
    stored = {tensor.name: np.array(tensor.data) for tensor in GGUFReader(file).tensors}
    # A pair that RoPE turns: rows 2i and 2i+1 of a head in GGUF, rows i and i + 8 in Hugging Face's order.
    for name, heads in (("q", HEADS), ("k", KV_HEADS)):
        mine, theirs = (
            values(source, f"model.layers.1.self_attn.{name}_proj.weight"),
            stored[f"blk.1.attn_{name}.weight"],
        )
        for head in range(heads):
            for pair in range(8):
                for half in range(2):
                    np.testing.assert_array_equal(
                        mine[head * 16 + half * 8 + pair], theirs[head * 16 + pair * 2 + half]
                    )
    np.testing.assert_array_equal(
        values(source, "model.layers.1.self_attn.v_proj.weight"), stored["blk.1.attn_v.weight"]
    )
    assert source.shape.dtype == "float32"


def test_biases_are_announced_in_the_config(tmp_path):
    attention = ("attn_q", "attn_k", "attn_v", "attn_output")
    source = converted(write_gguf(tmp_path / "model.gguf", biases=attention))
    assert source.config["attention_bias"] is True
    assert source.config["mlp_bias"] is False
    assert source.tensors["model.layers.0.self_attn.k_proj.bias"].shape == (32,)


def test_llama_3_factors_become_its_rope_scaling(tmp_path):
    # By hand, base 500000, 16 dimensions: the wavelengths 2π·500000^(2i/16) are 6, 32, 167, 863, 4443, 22900, ...;
    # below 8192/4 a frequency stays, above 8192 it is divided by 8.
    factors = llama3_factors(16, 500000.0, 8.0)
    assert factors[:4] == [1.0] * 4
    wavelength = 2 * np.pi * 500000 ** (8 / 16)
    smooth = (8192 / wavelength - 1) / 3
    assert factors[4] == pytest.approx(1 / ((1 - smooth) / 8 + smooth))
    assert factors[5:] == [8.0] * 3
    source = converted(write_gguf(tmp_path / "model.gguf", factors=factors))
    assert source.shape.rotary_scaling is not None
    assert source.config["rope_scaling"] == {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_llama_3_files_get_the_split_of_llama_3(tmp_path):
    source = converted(write_gguf(tmp_path / "model.gguf", kind="gpt2", pre="llama-bpe"))
    tokenizer = tokenizer_of(source)
    pieces = [text for text, _span in tokenizer.pre_tokenizer.pre_tokenize_str("It'S 12345\n\n x")]
    assert pieces == ["It", "'S", "Ġ", "123", "45", "ĊĊ", "Ġx"]
    assert tokenizer.encode("x").ids[0] == source.bos_id


@pytest.mark.parametrize(
    ("options", "change", "words"),
    [
        ({"architecture": "mamba"}, None, ["architecture mamba", "llama", "qwen2", "phi3"]),
        ({}, lambda w: w.add_expert_count(8), ["blk.0.ffn_gate.weight", "mixtral"]),
        ({}, lambda w: w.add_uint16("split.count", 3), ["one of 3 parts"]),
        ({}, lambda w: w.add_sliding_window(16), ["sliding_window", "16"]),
        ({}, add_longrope, ["longrope"]),
        ({"factors": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0]}, None, ["rope_freqs.weight"]),
        ({"leave_out": ("blk.1.ffn_up.weight",)}, None, ["model.layers.1.mlp.up_proj.weight"]),
        ({"biases": ("attn_q",)}, None, ["biases"]),
        (
            {},
            lambda w: w.add_tensor("blk.0.attn_sinks.weight", np.ones(HEADS, np.float32)),
            ["blk.0.attn_sinks.weight"],
        ),
        ({"kind": "gpt2", "pre": "mystery"}, None, ["split pattern 'mystery'", "gpt-2"]),
    ],
)
def test_refused_by_name(tmp_path, options, change, words):
    file = write_gguf(tmp_path / "model.gguf", change=change, **options)
    with pytest.raises(SourceError) as refusal:
        converted(file)
    assert [word for word in words if word not in str(refusal.value)] == []
    assert refusal.value.next
    assert not (tmp_path / "model").exists()


@pytest.mark.parametrize(
    ("heads", "kv_heads", "word"), [(0, 2, "0 under"), (4, 0, "0 under"), (3, 1, "no 3 heads of an even size")]
)
def test_heads_that_cannot_be_are_refused(tmp_path, monkeypatch, heads, kv_heads, word):
    # The tensors stay those of 4 and 2 heads.
    from gguf import GGUFWriter

    add, add_kv = GGUFWriter.add_head_count, GGUFWriter.add_head_count_kv
    monkeypatch.setattr(GGUFWriter, "add_head_count", lambda writer, _count: add(writer, heads))
    monkeypatch.setattr(GGUFWriter, "add_head_count_kv", lambda writer, _count: add_kv(writer, kv_heads))
    with pytest.raises(SourceError, match=word):
        converted(write_gguf(tmp_path / "x.gguf"))


@pytest.mark.parametrize("size", [40, 4000, -1000])
def test_a_file_cut_short_is_refused(tmp_path, size):
    file = write_gguf(tmp_path / "model.gguf")
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(SourceError, match="truncated or broken"):
        converted(file)


NAME = b"\x01\0\0\0\0\0\0\0a"
ARCHITECTURE = b"\x14\0\0\0\0\0\0\0general.architecture"


@pytest.mark.parametrize(
    ("pair", "word"),
    [
        (NAME + struct.pack("<IIQ", 9, 0, 1 << 40), "truncated or broken"),
        (NAME + struct.pack("<IIQ", 9, 8, 1 << 40), "truncated or broken"),
        (NAME + struct.pack("<IIQ", 9, 9, 1) + struct.pack("<IQ", 9, 1) * 3000, "truncated or broken"),
        (b"\xff" * 8 + b"a", "truncated or broken"),
        (ARCHITECTURE + struct.pack("<IQ", 8, 2) + b"\xff\xfe", "unreadable under general.architecture"),
    ],
    ids=["endless numbers", "endless texts", "nested", "endless name", "no text"],
)
def test_a_hostile_header_is_refused_at_once(tmp_path, pair, word):
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + pair)
    with pytest.raises(SourceError, match=word):
        converted(path)


def test_another_file_with_the_ending_gguf(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(SourceError, match="not a GGUF file"):
        converted(file)
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(SourceError, match="LFS pointer"):
        converted(file)


def test_without_the_library_the_extra_is_named(tmp_path, monkeypatch):
    file = write_gguf(tmp_path / "model.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(HostError, match="gguf is not installed") as refusal:
        converted(file)
    assert refusal.value.next == "pip install 'lpxbuild[gguf]'"


def test_values_too_large_for_float16_are_said(tmp_path):
    file = write_gguf(tmp_path / "model.gguf")
    output = Output.quiet()
    raw = bytearray(file.read_bytes())
    # The last tensor of the file is a norm in float32; its last value becomes 1e6.
    raw[-4:] = np.float32(1e6).tobytes()
    file.write_bytes(raw)
    fetch(str(file), None, destination=tmp_path / "out", dtype="float16", output=output)
    assert [notice for notice in output.notices if notice.startswith("1 values are too large for float16")]


def test_an_occupied_destination_is_refused(tmp_path):
    file = write_gguf(tmp_path / "model.gguf")
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "mine").write_text("keep")
    with pytest.raises(SourceError, match="is not empty"):
        converted(file)
