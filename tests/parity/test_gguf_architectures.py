"""GGUF files of every architecture beside llama, made here by the rules of llama.cpp's converter from known tensors.

What comes back must be those tensors, bit for bit; where transformers reads the architecture from GGUF, its loader and
its tokenizers answer too. (It has no gemma and no experts of `llama`. Of Gemma's vocabulary its llama reader gives the
ids: both are SentencePiece BPE. Its reader of Phi-3's vocabulary leaves out the blanks, so ids are Llama's there too.)
"""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from lpxbuild.errors import SourceError
from lpxbuild.output import Output
from lpxbuild.source import fetch

sys.path.insert(0, str(Path(__file__).parent))
from gguf_files import (  # isort: skip
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
HIDDEN, MLP, LAYERS, HEADS, KV_HEADS, EXPERTS = 64, 96, 2, 4, 2, 3
HEAD = {"qwen2": 16, "qwen3": 32, "gemma": 32, "phi3": 16, "mixtral": 16}
Tensors = dict[str, np.ndarray]


def hugging_face_tensors(model: str, vocabulary: int) -> Tensors:
    """Random tensors under the names that transformers has for them."""
    random = np.random.default_rng(7)

    def matrix(*shape: int) -> np.ndarray:
        return random.standard_normal(shape, dtype=np.float32)

    def norm(size: int = HIDDEN) -> np.ndarray:
        return random.integers(-64, 64, size).astype(np.float32) / 128  # exact with one added and taken away

    query, key_value = HEADS * HEAD[model], KV_HEADS * HEAD[model]
    tensors = {"model.embed_tokens.weight": matrix(vocabulary, HIDDEN), "model.norm.weight": norm()}
    if model != "gemma":
        tensors["lm_head.weight"] = matrix(vocabulary, HIDDEN)
    for layer in range(LAYERS):
        attention: Tensors = {"o_proj.weight": matrix(HIDDEN, query)}
        if model == "phi3":
            attention["qkv_proj.weight"] = matrix(query + 2 * key_value, HIDDEN)
        else:
            for name, rows in (("q", query), ("k", key_value), ("v", key_value)):
                attention[f"{name}_proj.weight"] = matrix(rows, HIDDEN)
                if model == "qwen2":
                    attention[f"{name}_proj.bias"] = matrix(rows)
        if model == "qwen3":
            attention |= {"q_norm.weight": norm(HEAD[model]), "k_norm.weight": norm(HEAD[model])}
        if model == "mixtral":
            mlp = {"block_sparse_moe.gate.weight": matrix(EXPERTS, HIDDEN)}
            for expert in range(EXPERTS):
                for name, shape in (("w1", (MLP, HIDDEN)), ("w2", (HIDDEN, MLP)), ("w3", (MLP, HIDDEN))):
                    mlp[f"block_sparse_moe.experts.{expert}.{name}.weight"] = matrix(*shape)
        elif model == "phi3":
            mlp = {"mlp.gate_up_proj.weight": matrix(2 * MLP, HIDDEN), "mlp.down_proj.weight": matrix(HIDDEN, MLP)}
        else:
            mlp = {f"mlp.{name}_proj.weight": matrix(MLP, HIDDEN) for name in ("gate", "up")}
            mlp["mlp.down_proj.weight"] = matrix(HIDDEN, MLP)
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}self_attn.{name}": value for name, value in attention.items()}
        tensors |= {f"{prefix}{name}": value for name, value in mlp.items()}
        tensors |= {f"{prefix}{name}_layernorm.weight": norm() for name in ("input", "post_attention")}
    return tensors


IN_LAYER = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.gate_up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "block_sparse_moe.gate": "ffn_gate_inp",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
OUTSIDE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def as_llama_cpp_writes_them(model: str, tensors: Tensors) -> Tensors:
    """Names and layouts of convert_hf_to_gguf.py: heads interleaved for `llama`, norms plus one for `gemma`, experts
    stacked."""
    written: Tensors = {}
    for name, value in tensors.items():
        module, _, suffix = name.rpartition(".")
        if ".experts." in name:
            continue
        if module in OUTSIDE:
            target = f"{OUTSIDE[module]}.{suffix}"
        else:
            _model, _layers, layer, rest = module.split(".", 3)
            target = f"blk.{layer}.{IN_LAYER[rest]}.{suffix}"
        if model == "mixtral" and module.endswith(("q_proj", "k_proj")):
            heads = HEADS if module.endswith("q_proj") else KV_HEADS
            halves = value.reshape(heads, 2, value.shape[0] // heads // 2, HIDDEN)
            value = halves.transpose(0, 2, 1, 3).reshape(value.shape)
        if model == "gemma" and name.endswith("norm.weight"):
            value = value + 1
        written[target] = value
    if model == "mixtral":
        for layer in range(LAYERS):
            for target, part in (("ffn_gate_exps", "w1"), ("ffn_down_exps", "w2"), ("ffn_up_exps", "w3")):
                names = [
                    f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{part}.weight" for expert in range(EXPERTS)
                ]
                written[f"blk.{layer}.{target}.weight"] = np.stack([tensors[name] for name in names])
    return written


def write(
    path: Path,
    model: str,
    *,
    float_type: str = "F32",
    change: Callable | None = None,
    window: int | None = 0,
    tensors: Callable[[Tensors], Tensors] = lambda written: written,
    experts_key: bool = True,
) -> tuple[Path, Tensors]:
    """A file and the tensors that it was made of. `change(writer)` adds keys, `tensors` changes what is stored."""
    from gguf import GGMLQuantizationType, GGUFWriter, quantize

    writer = GGUFWriter(path, "llama" if model == "mixtral" else model)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(MLP)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    if model == "gemma":
        writer.add_add_space_prefix(False)
    else:
        writer.add_rope_freq_base(1000000.0)
    if model in ("qwen3", "gemma"):
        writer.add_key_length(HEAD[model])
        writer.add_value_length(HEAD[model])
    if model == "phi3":
        writer.add_rope_dimension_count(12)
        writer.add_rope_scaling_orig_ctx_len(128)
        if window is not None:
            writer.add_sliding_window(window)
    if model == "mixtral" and experts_key:
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(2)
    if model in ("qwen2", "qwen3"):
        tokens = byte_level_vocabulary(writer, "qwen2")
    else:
        tokens = sentence_piece_vocabulary(writer, special=("<|user|>", "<|end|>") if model == "phi3" else ())
        writer.add_pad_token_id(0)
    if change is not None:
        change(writer)
    source = hugging_face_tensors(model, len(tokens))
    qtype = GGMLQuantizationType[float_type]
    for name, value in tensors(as_llama_cpp_writes_them(model, source)).items():
        if value.ndim == 1 or ".ffn_gate_inp." in name:
            writer.add_tensor(name, value)
        else:
            writer.add_tensor(name, quantize(value, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, source


@pytest.mark.parametrize("model", HEAD)
def test_every_tensor_comes_back_to_the_bit(tmp_path, model):
    file, tensors = write(tmp_path / "model.gguf", model)
    source = converted(file)  # whose check knows which tensors the family has
    assert source.shape.family == model
    assert set(source.tensors) == set(tensors)
    for name, value in tensors.items():
        np.testing.assert_array_equal(values(source, name), value, err_msg=name)


@pytest.fixture(scope="module")
def against_transformers(tmp_path_factory):
    """Architecture → (what lpx made of a file, what transformers made of it)."""
    work = tmp_path_factory.mktemp("architectures")
    (work / "lines.json").write_text(json.dumps(LINES))
    files = {
        "qwen2": write(work / "qwen2.gguf", "qwen2", float_type="Q8_0")[0],
        "qwen3": write(work / "qwen3.gguf", "qwen3", float_type="F16")[0],
        "phi3": write(work / "phi3.gguf", "phi3", float_type="Q4_1")[0],
        "llama_no_prefix": write_llama(work / "llama.gguf"),
    }
    command = [REFERENCE_PYTHON, Path(__file__).with_name("gguf_reference.py"), work / "lines.json"]
    for name, file in files.items():
        command += [file, work / f"{name}.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    answers = {name: json.loads((work / f"{name}.json").read_text()) for name in files}
    return {name: (converted(file), answers[name]) for name, file in files.items()}


def write_llama(path: Path) -> Path:
    """Gemma's vocabulary in a file that transformers reads: the same pieces and scores, no blank in front."""

    def change(writer) -> None:
        writer.add_add_space_prefix(False)

    experts = ("ffn_gate_exps", "ffn_down_exps", "ffn_up_exps", "ffn_gate_inp")

    def dense(written: Tensors) -> Tensors:
        kept = {name: value for name, value in written.items() if not any(part in name for part in experts)}
        for layer in range(LAYERS):
            for part in ("gate", "down", "up"):
                kept[f"blk.{layer}.ffn_{part}.weight"] = written[f"blk.{layer}.ffn_{part}_exps.weight"][0]
        return kept

    return write(path, "mixtral", change=change, tensors=dense, experts_key=False)[0]


@pytest.mark.parametrize(("model", "dtype"), [("qwen2", "bfloat16"), ("qwen3", "float16"), ("phi3", "bfloat16")])
def test_weights_are_those_of_transformers(against_transformers, model, dtype):
    source, theirs = against_transformers[model]
    assert source.shape.dtype == dtype
    assert sums_of(source, dtype) == {
        key: digest for key, digest in theirs["sha256"].items() if key.endswith(f" {dtype}")
    }


@pytest.mark.parametrize("model", ["qwen2", "qwen3"])
def test_ids_are_those_of_transformers(against_transformers, model):
    source, theirs = against_transformers[model]
    tokenizer = tokenizer_of(source)
    assert [tokenizer.encode(line, add_special_tokens=False).ids for line in LINES] == theirs["ids"]
    # Qwen's normalizer composes: an e with an accent after it is one letter.
    assert tokenizer.encode("cafe\u0301").ids == tokenizer.encode("café").ids


def test_gemma_ids_have_no_blank_in_front(against_transformers, tmp_path):
    theirs = against_transformers["llama_no_prefix"][1]
    source = converted(write(tmp_path / "model.gguf", "gemma")[0])
    tokenizer = tokenizer_of(source)
    assert [tokenizer.encode(line, add_special_tokens=False).ids for line in LINES] == theirs["ids"]
    assert tokenizer.decode(tokenizer.encode("  the quick").ids) == "  the quick"


@pytest.mark.parametrize("model", ["phi3", "mixtral"])
def test_a_blank_is_put_in_front_of_phi3_and_mixtral(tmp_path, model):
    tokenizer = tokenizer_of(converted(write(tmp_path / "model.gguf", model)[0]))
    assert tokenizer.encode("the quick").ids[0] == 1
    assert tokenizer.encode("the", add_special_tokens=False).tokens == ["▁the"]
    assert tokenizer.decode(tokenizer.encode("the quick").ids) == "the quick"


def test_phi3s_own_tokens_swallow_the_blanks_behind_them(tmp_path):
    tokenizer = tokenizer_of(converted(write(tmp_path / "model.gguf", "phi3")[0]))

    def ids(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False).ids

    user, the = tokenizer.token_to_id("<|user|>"), tokenizer.token_to_id("▁the")
    assert ids("<|user|>\n the") == ids("<|user|>the") == [user, the]
    assert ids("<s> the") != ids("<s>the")


@pytest.mark.parametrize(
    ("model", "wanted"),
    [
        ("qwen2", {"model_type": "qwen2", "hidden_act": "silu", "use_sliding_window": False, "rope_theta": 1000000.0}),
        ("qwen3", {"model_type": "qwen3", "head_dim": 32, "attention_bias": False, "tie_word_embeddings": False}),
        (
            "gemma",
            {
                "model_type": "gemma",
                "head_dim": 32,
                "hidden_activation": "gelu_pytorch_tanh",
                "rope_theta": 10000.0,
                "tie_word_embeddings": True,
            },
        ),
        (
            "phi3",
            {
                "model_type": "phi3",
                "sliding_window": None,
                "partial_rotary_factor": 0.75,
                "original_max_position_embeddings": 128,
                "rope_scaling": None,
            },
        ),
        (
            "mixtral",
            {
                "architectures": ["MixtralForCausalLM"],
                "model_type": "mixtral",
                "num_local_experts": 3,
                "num_experts_per_tok": 2,
                "sliding_window": None,
                "rope_theta": 1000000.0,
            },
        ),
    ],
)
def test_the_config_says_what_transformers_reads(tmp_path, model, wanted):
    fetch(str(write(tmp_path / "model.gguf", model)[0]), None, destination=tmp_path / "model", output=Output.quiet())
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert {key: config[key] for key in wanted} == wanted


SHORT, LONG = [1.0, 1.1, 1.25, 1.5, 1.75, 2.0], [1.0, 2.0, 4.5, 8.0, 16.0, 32.0]
# By hand: 512 positions over 128, √(1 + ln 4 / ln 128).
LONGROPE_ATTENTION = math.sqrt(1 + math.log(4) / math.log(128))


def longrope(written: Tensors) -> Tensors:
    factors = {"rope_factors_long.weight": LONG, "rope_factors_short.weight": SHORT}
    return written | {name: np.array(value, np.float32) for name, value in factors.items()}


def test_phi3s_rope_factors_become_longrope(tmp_path):
    file, _ = write(
        tmp_path / "model.gguf",
        "phi3",
        window=300,
        tensors=longrope,
        change=lambda writer: writer.add_rope_scaling_attn_factors(LONGROPE_ATTENTION),
    )
    fetch(str(file), None, destination=tmp_path / "model", output=Output.quiet())
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["rope_scaling"] == {"type": "longrope", "short_factor": SHORT, "long_factor": LONG}
    assert config["sliding_window"] == 300


def test_a_router_in_float32_does_not_change_the_dtype(tmp_path):
    source = converted(write(tmp_path / "model.gguf", "mixtral", float_type="F16")[0])
    assert source.shape.dtype == "float16"


def test_experts_in_tensors_of_their_own_are_read_too(tmp_path):
    def apart(written: Tensors) -> Tensors:
        result: Tensors = {}
        for name, value in written.items():
            if name.endswith("_exps.weight"):
                stem = name.removesuffix("_exps.weight")
                result |= {f"{stem}.{expert}.weight": value[expert] for expert in range(EXPERTS)}
            else:
                result[name] = value
        return result

    file, tensors = write(tmp_path / "model.gguf", "mixtral", tensors=apart)
    source = converted(file)
    assert set(source.tensors) == set(tensors)
    name = "model.layers.1.block_sparse_moe.experts.2.w2.weight"
    np.testing.assert_array_equal(values(source, name), tensors[name])


@pytest.mark.parametrize("pre", ["dbrx", "gpt-4o"])
def test_splits_of_phi4(tmp_path, pre):
    from gguf import GGUFWriter

    from lpxbuild.source.gguf.metadata import Metadata, open_gguf
    from lpxbuild.source.gguf.vocabulary import build_tokenizer

    writer = GGUFWriter(tmp_path / "x.gguf", "phi3")
    writer.add_context_length(128)
    tokens = byte_level_vocabulary(writer, pre)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    metadata = Metadata(tmp_path / "x.gguf", open_gguf(tmp_path / "x.gguf"))
    tokenizer = build_tokenizer(metadata, vocab_size=len(tokens)).model
    pieces = [text for text, _span in tokenizer.pre_tokenizer.pre_tokenize_str("camelCase 12345 It'S")]
    # GPT-4o's pattern cuts before a capital and keeps the 's with its word.
    assert (
        pieces
        == {
            "dbrx": ["camelCase", "Ġ", "123", "45", "ĠIt", "'S"],
            "gpt-4o": ["camel", "Case", "Ġ", "123", "45", "ĠIt'S"],
        }[pre]
    )
    assert tokenizer.encode("x").tokens == ["x"]  # neither begins with bos


def without(*parts: str) -> Callable[[Tensors], Tensors]:
    return lambda written: {name: value for name, value in written.items() if not any(part in name for part in parts)}


def one_expert_less(written: Tensors) -> Tensors:
    return {name: value[:-1] if name.endswith("_exps.weight") else value for name, value in written.items()}


def extra(name: str) -> Callable[[Tensors], Tensors]:
    return lambda written: written | {name: np.ones(HIDDEN, np.float32)}


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        ("qwen2", {"tensors": without("blk.1.attn_k.bias")}, ["lacks 1", "layers.1.self_attn.k_proj.bias"]),
        ("qwen2", {"change": lambda w: w.add_sliding_window(16)}, ["qwen2.attention.sliding_window", "16"]),
        ("qwen2", {"change": lambda w: w.add_rope_scaling_attn_factors(1.5)}, ["attn_factor", "1.5"]),
        ("qwen3", {"tensors": without("attn_q_norm")}, ["lacks 2", "q_norm"]),
        ("qwen3", {"tensors": extra("blk.0.attn_q.bias")}, ["blk.0.attn_q.bias", "qwen3"]),
        ("qwen3", {"change": lambda w: w.add_expert_count(4)}, ["qwen3.expert_count to 4"]),
        ("gemma", {"change": lambda w: w.add_final_logit_softcapping(30.0)}, ["final_logit_softcapping", "30"]),
        ("phi3", {"window": None}, ["no phi3.attention.sliding_window"]),
        ("phi3", {"tensors": lambda t: without("long")(longrope(t))}, ["6 short and 0 long"]),
        (
            "phi3",
            {"tensors": longrope, "change": lambda w: w.add_rope_scaling_attn_factors(1.19)},
            ["scales attention by 1.19", "128 to 512"],
        ),
        ("mixtral", {"tensors": one_expert_less}, ["ffn_gate_exps", "(2, 96, 64)", "3 experts"]),
        ("mixtral", {"tensors": without("ffn_gate_inp")}, ["lacks 2", "block_sparse_moe.gate"]),
        ("mixtral", {"change": lambda w: w.add_expert_shared_count(1)}, ["expert_shared_count"]),
        ("mixtral", {"tensors": extra("blk.0.attn_q.bias")}, ["blk.0.attn_q.bias", "mixtral"]),
    ],
)
def test_refused_by_name(tmp_path, model, options, words):
    file, _ = write(tmp_path / "model.gguf", model, **options)
    with pytest.raises(SourceError) as refusal:
        fetch(str(file), None, destination=tmp_path / "model", output=Output.quiet())
    assert [word for word in words if word not in str(refusal.value)] == []
    assert not (tmp_path / "model").exists()
