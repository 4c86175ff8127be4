"""The verdict for people: in the terminal, and as one HTML page that needs nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from html import escape as escaped
from typing import Any

from lpxbuild.output import Output
from lpxbuild.verify.charts import kl_chart, measure_chart, signal_chart
from lpxbuild.verify.verdict import Measure, Module, Verdict

WORST = 10
"""Modules that the terminal shows; the page has all of them."""
SHOWN_TOKENS = 1200


def escape(text: str) -> str:
    """For HTML, which has no way to write control characters."""
    return escaped("".join(letter if letter.isprintable() or letter in "\n\t " else "\ufffd" for letter in text))


def as_json(verdict: Verdict) -> str:
    """For the evidence folder."""
    return json.dumps(verdict.as_dict(), indent=1, ensure_ascii=False) + "\n"


def as_text(verdict: Verdict, output: Output) -> str:
    """For the terminal."""
    parts = []
    if verdict.measures:
        rows: list[tuple[str, ...]] = [
            (one.name, _number(one, one.estimate.value), _interval(one), _bounds(one), one.status)
            for one in verdict.measures
        ]
        parts.append(output.table(("measure", "value", "95 % interval", "warns / fails", "status"), rows))
    if verdict.perplexity is not None:
        source, built = verdict.perplexity
        parts.append(f"perplexity {source:.3f} (source) → {built:.3f}, {verdict.tokens} tokens of {verdict.text}")
    if verdict.max_kl is not None:
        parts.append(f"largest KL divergence {verdict.max_kl[0]:.3g} nats, at …{verdict.max_kl[1]!r}")
    if verdict.modules:
        shown = _worst(verdict)[:WORST]
        rows = [
            (
                module.name,
                module.format,
                f"{module.snr_db:.1f}",
                f"{module.gain:.4f}",
                f"lossy: {module.lossy}" if module.lossy else "ok" if module.ok else f"WRONG: {module.why}",
            )
            for module in shown
        ]
        table = output.table(("module (worst first)", "format", "SNR dB", "gain", ""), rows)
        parts.append(f"{table}\n{len(verdict.modules)} places compared, {len(verdict.wrong)} wrong")
    for answer in verdict.answers:
        parts.append("\n".join(_answer_lines(answer)))
    parts += [f"note: {note}" for note in verdict.notes]
    parts.append(verdict.summary())
    return "\n\n".join(parts)


def _answer_lines(answer: Any) -> Iterator[str]:
    yield f"prompt  {answer.prompt!r}"
    if answer.reference:
        yield f"source  {answer.reference!r}{'' if answer.complete else ' …'}"
    yield f"built   {answer.candidate!r}"
    if answer.reference:
        yield f"        the same for {answer.agree} of {answer.length} tokens"


def _worst(verdict: Verdict) -> list[Module]:
    """Wrong ones in the model's order, then the noisiest."""
    sound = sorted((module for module in verdict.modules if module.ok), key=lambda module: module.snr_db)
    return [*verdict.wrong, *sound]


def _number(measure: Measure, value: float) -> str:
    if measure.name == "mean KL divergence":
        return f"{value:.3g} nats"
    return f"{value:+.2%}" if measure.name == "perplexity rise" else f"{value:.2%}"


def _interval(measure: Measure) -> str:
    return f"{_number(measure, measure.estimate.low)} to {_number(measure, measure.estimate.high)}"


def _bounds(measure: Measure) -> str:
    sign = ">" if measure.above else "<"
    return f"{sign} {_number(measure, measure.warn)} / {sign} {_number(measure, measure.fail)}"


def as_html(verdict: Verdict, title: str) -> str:
    """One page: no scripts, no fonts, no pictures from elsewhere."""
    body = "".join(_sections(verdict, title))
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}: {escape(verdict.status)}</title><style>{_CSS}</style></head>"
        f"<body><main>{body}</main></body></html>\n"
    )


def _sections(verdict: Verdict, title: str) -> Iterator[str]:
    yield f'<header><h1>{escape(title)}</h1><p class="badge {_badge(verdict)}">{escape(verdict.status)}</p></header>'
    about = f"format {verdict.format}"
    if verdict.tokens:
        about += f" · {verdict.tokens} tokens of {verdict.text}"
    if verdict.facts:
        about += f" · against {verdict.facts['reference']} (transformers {verdict.facts['transformers']}), float32"
    yield f'<p class="about">{escape(about)} · {verdict.seconds:.0f} s</p>'
    if verdict.reasons:
        items = "".join(f"<li>{escape(reason)}</li>" for reason in verdict.reasons[:12])
        more = f"<li>… and {len(verdict.reasons) - 12} more</li>" if len(verdict.reasons) > 12 else ""
        yield f'<ul class="reasons">{items}{more}</ul>'
    if verdict.measures:
        yield "<section><h2>Next-token distributions</h2>" + "".join(map(_measure_row, verdict.measures))
        if verdict.perplexity is not None:
            source, built = verdict.perplexity
            yield f"<p>Perplexity <b>{source:.3f}</b> of the source, <b>{built:.3f}</b> of what was built.</p>"
        yield "</section>"
    if verdict.modules:
        yield "<section><h2>Signal-to-noise inside the model</h2>"
        yield "<p>Each place is computed from the source's own values before it: an error stays where it was made.</p>"
        yield signal_chart(verdict.modules)
        yield (
            '<p class="legend"><span class="key dot"></span> stored weights <span class="key arithmetic"></span> '
            'arithmetic <span class="key wrong"></span> wrong</p>'
        )
        yield _module_table(_worst(verdict)[: max(WORST, len(verdict.wrong))])
        yield f"<details><summary>All {len(verdict.modules)} places</summary>{_module_table(verdict.modules)}</details>"
        yield "</section>"
    if verdict.answers:
        yield "<section><h2>Greedy answers</h2>" + "".join(map(_answer, verdict.answers)) + "</section>"
    if verdict.token_kl:
        yield "<section><h2>Where they differ</h2>"
        yield kl_chart([value for _, value in verdict.token_kl])
        yield "<p>The stronger a token's colour, the more the two disagree about what follows it.</p>"
        yield f'<p class="text">{"".join(_tokens(verdict.token_kl[:SHOWN_TOKENS]))}</p></section>'
    if verdict.notes:
        items = "".join(f"<li>{escape(note)}</li>" for note in verdict.notes)
        yield f"<section><h2>Not part of the comparison</h2><ul>{items}</ul></section>"


def _badge(verdict: Verdict) -> str:
    return {"self-consistent": "warn"}.get(verdict.status, verdict.status)


def _measure_row(one: Measure) -> str:
    return (
        f'<div class="measure"><div><b>{escape(one.name)}</b><span class="number {one.status}">'
        f"{escape(_number(one, one.estimate.value))}</span><small>{escape(_interval(one))}</small></div>"
        f"{measure_chart(one)}</div>"
    )


def _module_table(modules: Sequence[Module]) -> str:
    rows = "".join(
        f'<tr class="{"" if module.ok else "bad"}"><td>{escape(module.name)}</td><td>{escape(module.format)}</td>'
        f"<td>{module.snr_db:.1f}</td><td>{module.worst_block_db:.1f}</td><td>{module.gain:.4f}</td>"
        f"<td>{escape(module.why or module.lossy) or 'ok'}</td></tr>"
        for module in modules
    )
    head = "<tr><th>module</th><th>format</th><th>SNR dB</th><th>worst block dB</th><th>gain</th><th></th></tr>"
    return f'<div class="scroll"><table>{head}{rows}</table></div>'


def _answer(answer: Any) -> str:
    source = f"<dt>source</dt><dd>{escape(answer.reference)}{'' if answer.complete else ' …'}</dd>"
    same = f'<dd class="same">the same for {answer.agree} of {answer.length} tokens</dd>'
    return (
        f"<dl><dt>prompt</dt><dd><b>{escape(answer.prompt)}</b></dd>{source if answer.reference else ''}"
        f"<dt>built</dt><dd>{escape(answer.candidate)}</dd>{same if answer.reference else ''}</dl>"
    )


def _tokens(token_kl: Sequence[tuple[str, float]]) -> Iterator[str]:
    most = max(value for _, value in token_kl) or 1.0
    for text, value in token_kl:
        shade = round(0.85 * (value / most) ** 0.5, 2)
        yield f'<span style="--shade:{shade}" title="{value:.2g} nats">{escape(text)}</span>'


_CSS = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#5d6670;--page:#fff;--line:#d9dee3;--panel:#f6f8fa;--blue:#2563c9;
--grey:#9aa4ae;--pass:#1a7f45;--warn:#9a6200;--fail:#c2281d;--heat:214 74 30}
@media(prefers-color-scheme:dark){:root{--ink:#e6e9ec;--soft:#9aa4ae;--page:#14171a;--line:#343a40;--panel:#1d2125;
--blue:#6ea8ff;--grey:#6b747d;--pass:#4cc27f;--warn:#e0a83c;--fail:#ff7a6e;--heat:255 120 70}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,"Segoe UI","DejaVu Sans",sans-serif}
main{max-width:920px;margin:0 auto;padding:28px 24px 60px}
header{display:flex;align-items:center;gap:16px;flex-wrap:wrap}
h1{font-size:24px;margin:0}h2{font-size:17px;margin:34px 0 8px}
.badge{margin:0;padding:3px 14px;border-radius:99px;border:2px solid;font-weight:700}
.pass{color:var(--pass)}.warn{color:var(--warn)}.fail{color:var(--fail)}
.about,small,.same,.legend{color:var(--soft)}.about{margin:8px 0}
.reasons{border-left:4px solid var(--warn);background:var(--panel);margin:12px 0;padding:10px 10px 10px 30px}
.measure{display:grid;grid-template-columns:minmax(0,1fr) 420px;gap:16px;align-items:center;
border-bottom:1px solid var(--line);padding:8px 0}
.measure div{display:flex;flex-wrap:wrap;gap:2px 12px;align-items:baseline}
.measure .number{font-size:19px;font-weight:700;font-variant-numeric:tabular-nums}
.measure small{flex-basis:100%}
svg{width:100%;height:auto;display:block}
.grid{stroke:var(--line)}.base{stroke:var(--grey);stroke-width:1.5}
.axis{fill:var(--soft);font-size:11px}
.dot{fill:var(--blue)}.arithmetic{fill:var(--grey)}.wrong{stroke:var(--fail);stroke-width:2.6;fill:none}
.bar{fill:var(--blue)}.interval{stroke:var(--blue);stroke-width:6;opacity:.45}
.value{fill:currentColor;stroke:var(--page);stroke-width:1.5}
.warn-bound{stroke:var(--warn);stroke-width:2}.fail-bound{stroke:var(--fail);stroke-width:2}
.legend{font-size:13px}.key{display:inline-block;width:10px;height:10px;border-radius:50%;margin:0 4px 0 14px}
.key.dot{background:var(--blue)}.key.arithmetic{background:var(--grey)}
.key.wrong{background:var(--fail);border-radius:2px}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:13px;margin:10px 0}
th,td{text-align:left;padding:4px 10px 4px 0;border-bottom:1px solid var(--line);vertical-align:top}
td:nth-child(n+3):nth-child(-n+5),th:nth-child(n+3):nth-child(-n+5){text-align:right;font-variant-numeric:tabular-nums}
td:last-child{padding-left:8px}
.bad td{color:var(--fail);font-weight:600}
summary{cursor:pointer;color:var(--soft)}
dl{display:grid;grid-template-columns:70px 1fr;gap:2px 12px;margin:12px 0;padding:10px 14px;background:var(--panel)}
dt{color:var(--soft)}dd{margin:0;white-space:pre-wrap;overflow-wrap:anywhere}.same{grid-column:2}
.text{white-space:pre-wrap;font-size:14px;line-height:1.7}
.text span{background:rgb(var(--heat)/var(--shade))}
@media(max-width:720px){.measure{grid-template-columns:1fr}}
@media print{:root{--ink:#000;--soft:#444;--page:#fff;--line:#bbb;--panel:#f3f3f3;--blue:#1f4f9e;--pass:#116b38;
--warn:#7a4d00;--fail:#a8160c;--heat:214 74 30}main{padding:0;max-width:none}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}section,.measure,dl,svg{break-inside:avoid}
section:has(.text),section:has(table){break-inside:auto}details:not([open]){display:none}}
"""
