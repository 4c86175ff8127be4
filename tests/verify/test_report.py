"""The verdict for people, the bundled text, and what cannot be compared."""

from __future__ import annotations

import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

from lpxbuild.errors import SourceError
from lpxbuild.output import Output
from lpxbuild.quantization.calibration.datasets import builtin_text
from lpxbuild.verify import checks
from lpxbuild.verify.metrics import Estimate
from lpxbuild.verify.report import as_html, as_json, as_text
from lpxbuild.verify.texts import check_text
from lpxbuild.verify.thresholds import LIMITS, markdown_table
from lpxbuild.verify.verdict import Answer, Module, Verdict, measures

ROOT = Path(__file__).parents[2]


def module(point: str, name: str, snr: float, why: str = "") -> Module:
    return Module(point, name, "model.x", "fp8", snr, snr - 8, 1.0, 22.0, not why, why)


VERDICT = Verdict(
    "fail",
    ("transformer.layers.1.mlp.fc: 3.0 dB, at least 22 are expected",),
    "fp8",
    tokens=3,
    text="builtin",
    measures=measures(
        Estimate(0.9, 0.8, 0.95),
        Estimate(0.01, 0.005, 0.02),
        Estimate(0.001, -0.01, 0.01),
        LIMITS["fp8"].warn,
        LIMITS["fp8"].fail,
    ),
    perplexity=(10.0, 10.01),
    max_kl=(0.5, "a\x01<b>"),
    modules=(
        module("embedding", "transformer.vocab_embedding", 200.0),
        module("layers.0.attention.q", "transformer.layers.0.attention.qkv (q)", 31.0),
        module("layers.1.mlp.gate", "transformer.layers.1.mlp.fc", 3.0, "3.0 dB, at least 22 are expected"),
        module("logits", "lm_head", 150.0),
    ),
    answers=(Answer("<script>alert(1)</script>", "one\ntwo", "one\x07", 1, 2, True),),
    token_kl=(("a", 0.5), ("<b>", 0.0), ("\x01", 1e-9)),
    facts={"reference": "LlamaForCausalLM", "transformers": "4.57.6"},
    notes=("something",),
)


def test_terminal_names_the_wrong_module_first() -> None:
    text = as_text(VERDICT, Output.quiet())
    lines = text.splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("module (worst first)"))
    assert lines[first + 1].startswith("transformer.layers.1.mlp.fc")
    assert "WRONG" in lines[first + 1]
    assert "4 places compared, 1 wrong" in text
    assert lines[-1].startswith("verify: fail")
    assert "perplexity 10.000 (source) → 10.010" in text


def test_json_has_everything_but_the_text() -> None:
    document = json.loads(as_json(VERDICT))
    assert document["wrong"] == [document["worst"]] == ["transformer.layers.1.mlp.fc"]
    assert document["ok"] is False
    assert "token_kl" not in document
    assert document["measures"][0]["estimate"] == {"value": 0.9, "low": 0.8, "high": 0.95}


def test_page_is_safe_whole_and_alone() -> None:
    class Tags(HTMLParser):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[str] = []

        def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
            self.found.append(tag)

    page = as_html(VERDICT, "lpx verify <x>")
    tags = Tags()
    tags.feed(page)
    assert not {"script", "link", "img", "b>"} & set(tags.found)
    assert tags.found.count("svg") == 3 + 1 + 1  # one for each measure, the modules, the tokens
    assert "&lt;script&gt;" in page
    assert not re.search("[\x00-\x08\x0b-\x1f]", page)
    assert page.count('class="wrong"') == 1
    assert "prefers-color-scheme:dark" in page
    assert "@media print" in page


def test_without_comparison_there_is_still_a_report() -> None:
    alone = Verdict("self-consistent", ("torch is not installed",), "none")
    assert "self-consistent" in as_text(alone, Output.quiet())
    assert "torch is not installed" in as_html(alone, "x")
    assert not alone.ok


def words(text: str) -> list[str]:
    return re.findall(r"\w+", text.lower())


def test_bundled_text_shares_nothing_with_the_calibration_text() -> None:
    """No six words in a row: what is measured on must not be what scales were fitted to."""

    def runs(text: str) -> set[tuple[str, ...]]:
        found = words(text)
        return {tuple(found[index : index + 6]) for index in range(len(found) - 5)}

    own = check_text("builtin", Path())
    assert len(words(own)) > 1400
    assert not runs(own) & runs(builtin_text())


def test_a_text_that_is_not_there_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    for name in ("none.txt", "empty.txt"):
        with pytest.raises(SourceError, match=name):
            check_text(name, tmp_path)


def test_table_in_the_docs() -> None:
    assert markdown_table().splitlines()[2] in (ROOT / "docs" / "verify.md").read_text(encoding="utf-8")
    assert markdown_table() in (ROOT / "docs" / "verify.md").read_text(encoding="utf-8")


def test_why_a_comparison_cannot_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In words, without loading anything."""
    assert "torch and transformers" in str(checks.missing_packages(Path(sys.executable)))
    assert "does not exist" in str(checks.missing_packages(tmp_path / "python"))
    monkeypatch.setattr("lpxbuild.quantization.calibration.interpreter.knows_model_type", lambda *_: True)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama"}))
    assert "tokenizer.json" in str(checks.not_judgeable(tmp_path, None))
    (tmp_path / "tokenizer.json").touch()
    assert checks.not_judgeable(tmp_path, None) is None
    # transformers would take the FP8 numbers of such a source for weights.
    config.write_text(json.dumps({"model_type": "llama", "quantization_config": {"quant_method": "modelopt"}}))
    assert "modelopt" in str(checks.not_judgeable(tmp_path, None))
    config.write_text(json.dumps({"model_type": "llama"}))
    (tmp_path / "hf_quant_config.json").touch()
    assert "quantized" in str(checks.not_judgeable(tmp_path, None))


def test_memory_is_that_of_a_layer_or_of_the_largest_table(tmp_path: Path) -> None:
    """Four layers of 1000 parameters, a table of 3000, in float16 files; float32 in memory."""
    import numpy as np
    from safetensors.numpy import save_file

    tensors = {f"model.layers.{number}.w.weight": np.zeros((10, 100), np.float16) for number in range(4)}
    save_file({**tensors, "model.embed_tokens.weight": np.zeros((30, 100), np.float16)}, tmp_path / "m.safetensors")
    assert checks.layerwise_bytes(tmp_path) == 2 * 4 * 3000 + checks.OVERHEAD
    assert checks.candidate_bytes(tmp_path) == 4 * 7000 + checks.OVERHEAD
    assert checks.stored_type(tmp_path, "float16") is None
    assert checks.stored_type(tmp_path, "bfloat16") == "bfloat16"
    assert checks.stored_type(tmp_path, "float32") is None
