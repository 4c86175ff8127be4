"""The table of methods for the docs."""

from __future__ import annotations

from lpxbuild.source.quantized.reading import methods


def markdown_table() -> str:
    """One row for each kind of each method."""
    lines = [
        "| method | kind | TensorRT-LLM checkpoint | unified checkpoint | loads the files as they are |",
        "|---|---|---|---|---|",
    ]
    for method in sorted(methods(), key=lambda one: (one.read is None, one.title.lower())):
        lines += [f"| {method.title} | {' | '.join(row)} |" for row in method.table]
    return "\n".join(lines) + "\n"
