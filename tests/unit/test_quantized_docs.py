"""docs/quantized-sources.md says what the methods' files say."""

from __future__ import annotations

from pathlib import Path

from lpxbuild.source.quantized import methods
from lpxbuild.source.quantized.table import markdown_table

PAGE = Path(__file__).resolve().parents[2] / "docs" / "quantized-sources.md"


def test_the_page_has_the_table_of_the_methods() -> None:
    assert markdown_table() in PAGE.read_text(encoding="utf-8")


def test_every_method_has_a_row() -> None:
    assert {method.title for method in methods()} == {
        "AutoAWQ",
        "FP8",
        "GPTQ",
        "NVIDIA ModelOpt",
        "compressed-tensors",
        "others",
    }
    assert all(method.table for method in methods())
