"""
The report of an evaluation, as lines for a screen and as one file of HTML that loads nothing.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from urllib.parse import quote

from stepengine.data.visible import format_count
from stepengine.evaluation.case_runs import Sample
from stepengine.evaluation.improvement import Improvement
from stepengine.evaluation.scoring import PASS, Pair, Scores
from stepengine.evaluation.statistics import FEWEST_CASES, Estimate, Ratio

SHOWN = 10
STYLE = """\
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 72rem; padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; }
th, td { border-bottom: 1px solid #8888; padding: .3rem .8rem; text-align: left; vertical-align: top; }
td.number { text-align: right; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
code { font: 14px/1.4 ui-monospace, monospace; overflow-wrap: anywhere; }
pre { white-space: pre-wrap; }
td { white-space: pre-line; }
"""


def summary_lines(scores: Scores) -> Iterator[str]:
    """Yield the summary of an evaluation as lines of text."""
    outcome = scores.outcome
    cases, sides = len(outcome.evaluation.cases), len(outcome.sides)
    yield (
        f"{outcome.evaluation.name}: {format_count(cases, 'case')}, {format_count(sides, 'side')}, "
        f"{format_count(outcome.evaluation.n, 'sample')} of each, seed {outcome.seed}"
    )
    if outcome.stopped:
        yield f"partial: {outcome.stopped}"
    for side, errors in scores.unmeasured.items():
        yield f"{side}: not measured, {format_count(errors, 'sample')} ended with an error of the provider or a tool server"
    width = max(
        [len(row.side) for row in scores.rows] + [len(p.side) + len(p.base) + 3 for p in scores.pairs], default=0
    )
    checks = max([len(row.check) for row in scores.rows], default=0)
    yield f"{'side':{width}}  {'check':{checks}}  {'mean':>6}  {'95 %':13}  cases  samples  left out"
    for row in scores.rows:
        yield (
            f"{row.side:{width}}  {row.check:{checks}}  {_format_mean(row.mean.mean):>6}  {_format_interval(row.mean):13}  "
            f"{row.mean.cases:5}  {row.samples:7}  {row.errors:8}"
        )
    for pair in scores.pairs:
        yield f"{f'{pair.side} - {pair.base}':{width}}  {pair.check:{checks}}  {_describe_difference(pair, _count_p_values(scores))}"
    for each in scores.ratios:
        if each.ratio.ratio is not None:
            interval = _format_interval(each.ratio)
            ends = f" ({interval})" if interval else ""
            left = f", {each.ratio.left_out} left out" if each.ratio.left_out else ""
            yield f"{each.of}: {each.side} needs {each.ratio.ratio:.2f} times as much as {each.base}{ends}; {format_count(each.ratio.pairs, 'case')}{left}"
    yield from _remark_lines(scores)


def _remark_lines(scores: Scores) -> Iterator[str]:
    """Yield remarks as lines: missing intervals, continued samples, broken checks, the detectable difference and the cost."""
    most = max([row.mean.cases for row in scores.rows], default=0)
    if most < FEWEST_CASES:
        yield f"no confidence interval: {format_count(most, 'case')}, at least {FEWEST_CASES} are needed"
    mixed = [(s.side, s.reused) for s in scores.outcome.samples if s.reused.startswith("from ")]
    for side in dict.fromkeys([side for side, _ in mixed]):
        yield f"{side}: {format_count(sum(s == side for s, _ in mixed), 'sample')} continued from a recorded start that other samples share"
    for name, said in scores.broken.items():
        yield f"the check {name} is broken: {said}"
    shown = next((p.difference.detectable for p in scores.pairs if p.check == PASS and p.difference.detectable), None)
    if shown is not None:
        yield f"the smallest difference in {PASS} that this number of cases can show is about {shown:.2f}"
    yield f"spent ${scores.outcome.spent}"


def failed_sample_lines(
    scores: Scores, folder: Path, get_agent_options: Callable[[Sample], str] = lambda _: ""
) -> Iterator[str]:
    """Yield the first failed samples with the commands that debug them; *get_agent_options* returns more options of a command."""
    failed = [
        s
        for s in scores.outcome.samples
        if s.status == "error" or (s.passed is not True and any(x.passed is not True for x in s.scores.values()))
    ]
    for sample in failed[:SHOWN]:
        why = next((f"{name}: {x.reason}" for name, x in sample.scores.items() if x.passed is not True), sample.status)
        yield f"{sample.case} {sample.side} {sample.n}: {why}"
        yield f"    stepengine debug {shlex.quote(str(folder / sample.journal))}{get_agent_options(sample)}"
    if len(failed) > SHOWN:
        yield f"and {len(failed) - SHOWN} more"


def _count_p_values(scores: Scores) -> int:
    """Return the number of pairs that have a p value."""
    return sum(pair.difference.p is not None for pair in scores.pairs)


def _describe_difference(pair: Pair, test_count: int) -> str:
    """Return a difference with its interval and p value, and with the p value adjusted for *test_count* tests."""
    made = pair.difference
    ends = "" if made.low is None or made.high is None else f" ({made.low:+.2f} to {made.high:+.2f})"
    p = "" if made.p is None else f", p {made.p:.3f}"
    p += (
        f", adjusted for {test_count} comparisons {pair.p_adjusted:.3f}"
        if pair.p_adjusted is not None and test_count > 1
        else ""
    )
    mean = "no case in common" if math.isnan(made.mean) else f"{made.mean:+.2f}"
    return f"{mean}{ends}{p}; {pair.better} better, {pair.worse} worse, {pair.equal} equal"


def _format_mean(value: float) -> str:
    """Return a mean with two digits; ``"-"`` for NaN."""
    return "-" if math.isnan(value) else f"{value:.2f}"


def _format_interval(estimate: Estimate | Ratio) -> str:
    return "" if estimate.low is None or estimate.high is None else f"{estimate.low:.2f} to {estimate.high:.2f}"


# --- as a page --------------------------------------------------------------------------------------------------------


def _clean_and_escape(clean: Callable[[str], str], text: object) -> str:
    """Return a value as text without secrets, escaped for HTML."""
    return html.escape(clean(str(text)))


def render_report(scores: Scores, gates: Sequence[str], clean: Callable[[str], str], pages: Mapping[str, str]) -> str:
    """
    Return the report as HTML without scripts and external resources. All texts are escaped; links lead to pages of runs only.

    Args:
        scores: The scores of the evaluation.
        gates: A line for each gate.
        clean: Removes secrets from a text.
        pages: The paths of the pages of runs by the paths of their journals, relative to the folder of the results.
    """
    escape = partial(_clean_and_escape, clean)
    outcome = scores.outcome
    parts = [
        *_render_summary(scores, gates, escape),
        *([f"<p><strong>{escape(f'partial: {outcome.stopped}')}</strong></p>"] if outcome.stopped else []),
        *[
            _render_table(caption, names, rows, escape)
            for caption, names, rows in (*_make_score_tables(scores), *_make_sample_tables(scores, pages))
        ],
    ]
    return _render_page(outcome.evaluation.name, parts, escape)


def _render_summary(scores: Scores, gates: Sequence[str], escape: Callable[[object], str]) -> Iterator[str]:
    """Yield the summary, remarks and gates as paragraphs of HTML."""
    yield f"<p>{escape(next(summary_lines(scores)))}</p>"
    yield from [f"<p>{escape(line)}</p>" for line in [*_remark_lines(scores), *gates]]


def _render_page(title: str, parts: Sequence[str], escape: Callable[[object], str]) -> str:
    """Return a whole HTML page with a title and style, which loads nothing."""
    style = base64.b64encode(hashlib.sha256(STYLE.encode()).digest()).decode()
    head = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        f"<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'sha256-{style}'; base-uri 'none'; form-action 'none'\">",
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{STYLE}</style></head><body><main>",
        f"<h1>{escape(title)}</h1>",
    ]
    return "\n".join([*head, *parts, "</main></body></html>"]) + "\n"


def render_improvement(improvement: Improvement, clean: Callable[[str], str]) -> str:
    """
    Return the result of a search for a better version as HTML, like ``render_report``.

    Args:
        improvement: The result.
        clean: Removes secrets from a text.
    """
    escape = partial(_clean_and_escape, clean)
    found, scores = improvement.found, improvement.scores
    changed = [(name, improvement.parts[name], value) for name, value in found["changes"].items()]
    versions = [
        (
            "-" if v["number"] is None else v["number"], ", ".join(map(str, v["parents"])), ", ".join(v["changes"]), v["why"], v["came_of_it"],
            "" if v["mean"] is None else _format_mean(v["mean"]), v["cases"], f"${v['spent']}",
        )
        for v in found["versions"]
    ]  # fmt: skip
    names = ("version", "parent", "changes", "reason", "outcome", f"mean {improvement.by}", "cases", "spent so far")
    told = [
        f"<p><strong>{escape(improvement.describe())}</strong></p>", f"<p>{escape(found['why'])}; spent ${escape(improvement.spent)}</p>",
        *([] if not changed else [_render_table("Changes", ("part", "before", "after"), changed, escape)]),
        *([] if not improvement.diff else [f"<pre><code>{escape(improvement.diff)}</code></pre>"]),
        *([] if scores is None else [*_render_summary(scores, (), escape), *[_render_table(*table, escape) for table in (*_make_score_tables(scores), *_make_sample_tables(scores, {}))]]),
        _render_table("Tried versions", names, versions, escape),
    ]  # fmt: skip
    return _render_page("improvement", told, escape)


Table = tuple[str, Sequence[str], Sequence[Sequence[object]]]
"""Caption, names of the columns, and rows. A cell is a value, or a text and the file of the folder to which it leads."""


def _make_score_tables(scores: Scores) -> Iterator[Table]:
    """Yield the tables of means, paired differences and ratios."""
    yield (
        "Means",
        ("side", "check", "mean", "95 %", "cases", "samples", "left out"),
        [
            (r.side, r.check, _format_mean(r.mean.mean), _format_interval(r.mean), r.mean.cases, r.samples, r.errors)
            for r in scores.rows
        ],
    )
    if scores.pairs:
        rows = [
            (f"{p.side} - {p.base}", p.check, _describe_difference(p, _count_p_values(scores))) for p in scores.pairs
        ]
        yield "Paired differences", ("sides", "check", "difference"), rows
    ratios = [
        (f"{r.side} / {r.base}", r.of, f"{r.ratio.ratio:.2f}", _format_interval(r.ratio), r.ratio.pairs)
        for r in scores.ratios
        if r.ratio.ratio is not None
    ]
    if ratios:
        yield "Ratios", ("sides", "of", "ratio", "95 %", "cases"), ratios


def _make_sample_tables(scores: Scores, pages: Mapping[str, str]) -> Iterator[Table]:
    """Yield the table of all samples, with links to the pages of their runs."""
    rows: list[Sequence[object]] = []
    for s in scores.outcome.samples:
        said = "; ".join([f"{name}: {x.reason or x.state}" for name, x in s.scores.items() if x.passed is not True])
        passed = "unknown" if s.passed is None else "yes" if s.passed else "no"
        cost = "unknown" if s.cost is None else f"${s.cost}"
        rows.append(
            (
                s.case,
                s.side,
                s.n,
                s.status,
                passed,
                said,
                cost,
                s.steps,
                s.reused,
                (s.journal, pages.get(s.journal, "")),
            )
        )
    yield "Samples", ("case", "side", "n", "status", "passed", "why not", "cost", "steps", "from", "journal"), rows


def _render_table(
    caption: str, names: Sequence[str], rows: Sequence[Sequence[object]], escape: Callable[[object], str]
) -> str:
    head = "".join([f'<th scope="col">{escape(name)}</th>' for name in names])
    body = "\n".join([f"<tr>{''.join([_render_cell(value, escape) for value in row])}</tr>" for row in rows])
    return f"<table><caption>{escape(caption)}</caption><thead><tr>{head}</tr></thead><tbody>\n{body}\n</tbody></table>"


def _render_cell(value: object, escape: Callable[[object], str]) -> str:
    """Return a table cell as HTML; a text and file become a link."""
    if isinstance(value, tuple):
        text, file = value
        # The dot keeps a name with a colon from being read as a scheme.
        return (
            f'<td><a href="./{html.escape(quote(file))}">{escape(text)}</a></td>'
            if file
            else f"<td>{escape(text)}</td>"
        )
    return f'<td class="number">{escape(value)}</td>' if isinstance(value, int) else f"<td>{escape(value)}</td>"
