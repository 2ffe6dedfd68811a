"""Markdown, picture and page of a sweep."""

import json
import math
import re
import struct
from html.parser import HTMLParser

import pytest

from tests.experiments.conftest import AXES, HEAD, Workshop
from titan_lowprec.experiments.curves import MOST_POINTS, panel_curves, thin
from titan_lowprec.experiments.figures import overview
from titan_lowprec.experiments.page import html_table
from titan_lowprec.experiments.panels import SECTIONS
from titan_lowprec.experiments.report import write_report
from titan_lowprec.experiments.results import load_histories, summarise
from titan_lowprec.titan.metrics_file import read_metrics

HARD_NAME = '[[include]]\nname = "recipe=c7"\nset = { "attention.weight_exponent" = 7 }\n'


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    workshop = Workshop(tmp_path_factory.mktemp("sweep"))
    text = HEAD.replace("[matrix]", '[matrix]\nquestion = "Is 1 < 2 & 3?"') + AXES + HARD_NAME
    runs = workshop.resolve(text)
    for run in runs[:5]:
        workshop.record(run, [5.0, 4.0, 3.0, 2.0 + 0.01 * run.seed, 1.0])
    workshop.record(runs[5], [5.0, math.nan], status="failed", reason="<b>cabbage</b>")
    return summarise(workshop.matrix(text), load_histories(runs, read_metrics))


@pytest.fixture(scope="module")
def report(results, tmp_path_factory):
    """The folder of a report named ``x_1.5``."""
    folder = tmp_path_factory.mktemp("report") / "below"
    assert write_report(results, folder, to=folder / "x_1.5") == folder / "x_1.5.html"
    return folder


class Page(HTMLParser):
    """Sources, tags and text of a page; unbalanced tags are an error."""

    VOID = frozenset({"meta", "img", "wbr"})

    def __init__(self, text):
        super().__init__()
        self.sources, self.words, self.open = [], [], []
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag, attributes):
        self.sources += [value for key, value in attributes if key in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.sources += [value for key, value in attributes if key in ("src", "href")]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.words.append(data)


@pytest.mark.slow
def test_page_opens_without_network_and_escapes_what_it_quotes(report):
    text = (report / "x_1.5.html").read_text()
    page = Page(text)
    assert page.sources and all(source.startswith("data:") for source in page.sources)
    assert not re.search(r"<script|@import|url\(|https?://", text)
    words = " ".join(page.words)
    assert "Is 1 < 2 & 3?" in words and "<b>cabbage</b>" in words


@pytest.mark.slow
def test_page_has_every_section_and_names_what_no_run_recorded(report):
    words = " ".join(Page((report / "x_1.5.html").read_text()).words)
    for section in SECTIONS:
        assert section.title in words
    missing = r"Largest change of an earlier row of O: no run recorded\s+causality/relative_change"
    assert re.search(missing, words)


def test_health_is_drawn_where_it_was_measured(workshop):
    run = workshop.saved()[0]
    workshop.record(run, [3.0, 2.0, 1.0])
    lines = (run.folder / "metrics.jsonl").read_text().splitlines()
    measured = {**json.loads(lines[1]), "causality/leaking_rows/largest": 7.0}
    lines[1] = json.dumps(measured)
    (run.folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    results = summarise(workshop.matrix(), load_histories([run], read_metrics))
    (panel,) = (
        p for s in SECTIONS for p in s.panels if p.local == "causality/leaking_rows/largest"
    )
    (curve,) = panel_curves(panel, results)
    assert curve.points == ((2.0, 7.0),)


@pytest.mark.slow
def test_markdown_has_arms_verdicts_failures_and_settings(report):
    text = (report / "x_1.5.md").read_text()
    assert re.search(r"^\| recipe=mxfp8 \| acceptable \| 2/2 \| 1\.0000 ", text, re.M)
    assert "- recipe=c7, seed 1: failed, <b>cabbage</b>" in text
    assert "| recipe=c7 | bf16 | 7 |" in text and "(x_1.5.png)" in text


@pytest.mark.slow
def test_picture_is_a_png_of_the_asked_size(report):
    data = (report / "x_1.5.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (1210, 792)


@pytest.mark.slow
def test_overview_holds_its_legend_whatever_the_arms_are_called(workshop):
    names = [f"recipe=nvfp4_mixed,weight_exponent={i},scales=token_block" for i in range(5)]
    text = HEAD.replace("recipe=bf16", names[0]) + "".join(
        f'[[include]]\nname = "{name}"\nset = {{ "attention.weight_exponent" = {i} }}\n'
        for i, name in enumerate(names)
    )
    runs = workshop.resolve(text)
    for run in runs:
        workshop.record(run, [5.0, 4.0, 3.0])
    figure = overview(summarise(workshop.matrix(text), load_histories(runs, read_metrics)))
    figure.canvas.draw()
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.x1
    ticks = [tick for axes in figure.axes if axes.axison for tick in axes.get_xticks()]
    assert ticks and all(tick == round(tick) for tick in ticks)


def test_a_sticky_name_can_go_on_in_the_next_line():
    table = html_table(("arm", "x"), [("scales=token_block,a<b", "token_block")], verdicts=False)
    assert "<td>scales=<wbr>token_<wbr>block,<wbr>a&lt;b</td><td>token_block</td>" in table


def test_difference_curve_is_arm_minus_baseline_without_non_finite_points(results):
    panel = next(p for s in SECTIONS for p in s.panels if p.kind == "difference")
    curves = {(curve.arm, curve.seed): curve for curve in panel_curves(panel, results)}
    assert ("recipe=bf16", 0) not in curves
    assert [y for _, y in curves["recipe=mxfp8", 1].points] == [0.0] * 5
    assert curves["recipe=c7", 1].points == ((100.0, 0.0),)
    assert not curves["recipe=c7", 1].finished


def test_long_curves_are_thinned_to_means(results):
    points = [(float(i), float(i)) for i in range(3 * MOST_POINTS)]
    thinned = thin(points)
    assert len(thinned) == MOST_POINTS and thinned[0] == (1.0, 1.0)
