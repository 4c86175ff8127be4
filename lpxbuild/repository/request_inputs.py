"""The table of request inputs for the documentation, generated from the same rows that the model reads."""

from __future__ import annotations

from lpxbuild.repository.tensors import RequestInput, request_inputs


def request_inputs_table() -> str:
    """Markdown: each official input of tensorrt_llm, how the ensemble calls it, and what each backend does with it."""
    rows = request_inputs()
    backends = list(rows[0].backends or {})
    lines = [
        "| `tensorrt_llm` | `ensemble` | type | shape | " + " | ".join(f"`{name}`" for name in backends) + " |",
        "|---|---|---|---|" + "---|" * len(backends),
    ]
    for row in rows:
        cells = [
            f"`{row.name}`" + ("" if row.optional else " (required)"),
            f"`{row.client}`" if row.client else "–",
            row.data_type,
            f"[{', '.join(str(size) for size in row.dims)}]",
            *(_verdict(row, backend) for backend in backends),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _verdict(row: RequestInput, backend: str) -> str:
    verdict = (row.backends or {})[backend]
    if verdict != "refused" or not row.neutral:
        return verdict
    return f"refused (neutral: {', '.join(_literal(value) for value in row.neutral)})"


def _literal(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return '""' if value == "" else str(value)
