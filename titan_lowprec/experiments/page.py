"""A sweep's report as one HTML file: pictures inside, no script, no network."""

import base64
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from titan_lowprec.experiments.figures import arm_styles, panel_svg
from titan_lowprec.experiments.panels import SECTIONS, Section
from titan_lowprec.experiments.report_table import (
    HEADER,
    notes,
    problem_lines,
    setting_rows,
    table_rows,
)
from titan_lowprec.experiments.results import Results

STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1240px; padding: 16px; background: #fff; color: #1d2329;
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 1.1rem; margin: 28px 0 8px; }
.scroll { overflow-x: auto;
  background: linear-gradient(to left, #fff 40%, #fff0) right / 40px 100% no-repeat local,
    linear-gradient(to left, #0003, #0000) right / 12px 100% no-repeat scroll; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 5px 12px 5px 0; text-align: left; border-bottom: 1px solid #e3e6ea;
  white-space: nowrap; }
th { color: #58616b; font-weight: 600; white-space: normal; vertical-align: bottom; }
th:first-child, td:first-child { position: sticky; left: 0; background: #fff;
  white-space: normal; min-width: 9em; max-width: min(45vw, 24em); }
.verdict { font-weight: 600; }
.good { color: #06794f; } .bad { color: #b3261e; } .open { color: #6b5900; }
.legend { display: flex; flex-wrap: wrap; gap: 4px 18px; padding: 0; list-style: none; }
.legend li { display: flex; align-items: center; gap: 6px; }
.legend svg { flex: none; }
.panels { display: grid; gap: 16px;
  grid-template-columns: repeat(auto-fill, minmax(min(100%, 500px), 1fr)); }
.panels img { width: 100%; height: auto; }
ul { padding-left: 20px; } li { overflow-wrap: anywhere; }
.none { color: #58616b; }
"""


def page(results: Results, *, folder: Path) -> str:
    """The report as HTML.

    Args:
        results: The computed table.
        folder: The sweep's folder, with the plan.
    """
    matrix = results.matrix
    problems = problem_lines(results)
    parts = [
        f"<p>{escape(matrix.question)}</p>" if matrix.question else "",
        html_table(HEADER, table_rows(results), verdicts=True),
        f"<h2>Runs without a result</h2>{html_list(problems)}" if problems else "",
        html_list(notes(results, folder)),
        "<h2>Arms</h2>",
        legend(results),
        *(section_html(section, results) for section in SECTIONS),
        "<h2>Settings in which arms differ</h2>",
        html_table(*setting_rows(results), verdicts=False),
    ]
    return document(matrix.name, parts)


def document(title: str, parts: Sequence[str]) -> str:
    """A page of its own from the parts that hold something."""
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n"
        + "\n".join(part for part in parts if part)
        + "\n</body></html>\n"
    )


def html_table(header: Sequence[str], rows: Sequence[Sequence[str]], *, verdicts: bool) -> str:
    """A table that scrolls sideways on a narrow screen; ``verdicts`` colours the second column."""
    head = "".join(f"<th>{breakable(cell)}</th>" for cell in header)
    body = ""
    for row in rows:
        cells = [f"<td>{breakable(row[0])}</td>", *(f"<td>{escape(cell)}</td>" for cell in row[1:])]
        if verdicts:
            cells[1] = f'<td class="verdict {verdict_class(row[1])}">{escape(row[1])}</td>'
        body += f"<tr>{''.join(cells)}</tr>\n"
    return (
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead>'
        f"<tbody>\n{body}</tbody></table></div>"
    )


def breakable(name: str) -> str:
    """A name that may go on in the next line: a sticky column must leave room for the others."""
    return "<wbr>".join(map(escape, re.split(r"(?<=[,/._=])(?=\w)", name)))


def verdict_class(text: str) -> str:
    """Colour of a verdict, beside its words."""
    if text.startswith(("not acceptable", "failed")):
        return "bad"
    return "good" if text.startswith("acceptable") else "open" if text != "baseline" else ""


def html_list(lines: Sequence[str]) -> str:
    """A list of sentences."""
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def legend(results: Results) -> str:
    """Colour and dash of each arm, once for all panels."""
    patterns = {"-": "none", "--": "6 3", ":": "2 2", "-.": "6 2 2 2"}
    items = "".join(
        f'<li><svg width="30" height="8" aria-hidden="true"><line x1="0" y1="4" x2="30" y2="4" '
        f'stroke="{color}" stroke-width="3" stroke-dasharray="{patterns[dash]}"/></svg>'
        f"{escape(arm)}</li>"
        for arm, (color, dash) in arm_styles(results).items()
    )
    seeds = len(results.matrix.seeds) > 1
    return (
        f'<ul class="legend">{items}</ul><p class="none">'
        + ("Thin lines are seeds, thick ones their mean. " if seeds else "")
        + "A cross ends a run that did not finish. On training losses a triangle is a spike, a "
        "square a skipped step, a vertical line a restart."
        + (
            " A dotted grey line, where it is in range, is the acceptable difference."
            if results.matrix.acceptable_difference
            else ""
        )
        + "</p>"
    )


def section_html(section: Section, results: Results) -> str:
    """A section's panels, and which of them no run recorded."""
    images, missing = "", []
    for panel in section.panels:
        svg = panel_svg(panel, results)
        if svg is None:
            missing.append(panel)
            continue
        data = base64.b64encode(svg.encode()).decode()
        images += f'<img alt="{escape(panel.title)}" src="data:image/svg+xml;base64,{data}">'
    text = f"<h2>{escape(section.title)}</h2>"
    if section.note and images:
        text += f'<p class="none">{escape(section.note)}</p>'
    if images:
        text += f'<div class="panels">{images}</div>'
    for panel in missing:
        text += (
            f'<p class="none">{escape(panel.title)}: no run recorded '
            f"<code>{escape(panel.local)}</code> in metrics.jsonl.</p>"
        )
    return text
