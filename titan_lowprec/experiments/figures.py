"""Plots of a sweep: one SVG per panel, and a PNG overview."""

import io
import math
from pathlib import Path
from typing import Any

from titan_lowprec.experiments.anomalies import anomalies
from titan_lowprec.experiments.curves import Curve, panel_curves
from titan_lowprec.experiments.panels import SECTIONS, Panel
from titan_lowprec.experiments.results import Results

COLORS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D31")
"""Distinguishable with colour-blindness (Okabe and Ito), the baseline apart, on top."""
BASELINE_COLORS = ("#222222", "#777777", "#aaaaaa")
DASHES = ("-", ":", "-.")
FEW_POINTS = 12
"""Curves with at most so many points show them."""
LEGEND_LETTERS = 140
"""Of 9 points beside one another in the overview; a legend's line takes the place of ten."""
LINE_LETTERS = 10
MARKS = {"spike": "^", "skipped": "s"}
COUNTS = frozenset({"steps", "rows", "bits"})
"""Units of which there is no half."""
AXIS_LABELS = {"step": "optimizer step", "valid_tokens_seen": "valid tokens"}


def arm_styles(results: Results) -> dict[str, tuple[str, str]]:
    """Colour and dash of each arm."""
    baselines = list(dict.fromkeys(results.matrix.baselines.values()))
    others = [arm.arm for arm in results.arms if arm.arm not in baselines]
    styles = {
        arm: (BASELINE_COLORS[number % len(BASELINE_COLORS)], "--")
        for number, arm in enumerate(baselines)
    }
    for number, arm in enumerate(others):
        styles[arm] = (COLORS[number % len(COLORS)], DASHES[number // len(COLORS) % len(DASHES)])
    return styles


def draw(axes: Any, panel: Panel, curves: tuple[Curve, ...], results: Results) -> None:
    """Draw a panel's curves: seeds thin, their mean thick, unfinished runs marked at their end."""
    styles = arm_styles(results)
    averaged = {curve.arm for curve in curves if curve.seed is None}
    for curve in curves:
        color, dash = styles[curve.arm]
        thick = curve.seed is None or curve.arm not in averaged
        xs, ys = zip(*curve.points, strict=True)
        front = 3 if curve.arm in results.matrix.baselines.values() else 2
        few = panel.kind == "validation" or len(xs) <= FEW_POINTS
        axes.plot(
            xs,
            ys,
            color=color,
            linestyle=dash,
            linewidth=1.4 if thick else 0.6,
            alpha=1.0 if thick else 0.45,
            marker="o" if few else None,
            markersize=3,
            zorder=front,
        )
        if not curve.finished and curve.seed is not None:
            axes.plot(xs[-1:], ys[-1:], color=color, marker="x", markersize=8)
    if panel.kind == "train" and panel.local == "loss":
        mark_anomalies(axes, panel, results)
    if panel.kind == "difference":
        low, high = axes.get_ylim()
        axes.axhline(0, color="0.6", linewidth=0.8)
        limit = results.matrix.acceptable_difference
        axes.axhline(limit, color="0.6", linewidth=0.8, linestyle=":")
        axes.set_ylim(low, high)  # a far limit must not flatten the curves
    elif {y for curve in curves for _, y in curve.points} == {0.0}:
        axes.set_ylim(-0.05, 1)  # nothing happened, and nothing is negative
    if panel.unit in COUNTS:
        axes.yaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.xaxis.get_major_locator().set_params(integer=True)  # steps and tokens
    axes.xaxis.set_major_formatter(thousands)
    axes.set_title(panel.title, fontsize=11, loc="left")
    axes.set_xlabel(AXIS_LABELS[panel.axis], fontsize=10)
    axes.set_ylabel(panel.unit, fontsize=10)
    axes.tick_params(labelsize=9)
    axes.grid(color="0.92", linewidth=0.6)
    axes.spines[["top", "right"]].set_visible(False)


def say_missing(axes: Any, panel: Panel) -> None:
    """Leave an empty panel that says so: axes without curves look like a fault."""
    axes.set_axis_off()
    axes.set_title(panel.title, fontsize=10, loc="left")
    axes.text(0.5, 0.5, "no run recorded it", ha="center", color="0.5", fontsize=9)


def mark_anomalies(axes: Any, panel: Panel, results: Results) -> None:
    """Mark spikes, skipped steps and restarts on training losses."""
    styles = arm_styles(results)
    for item in results.histories:
        color, _ = styles[item.run.arm]
        for event in anomalies(item.train):
            x = event.step if panel.axis == "step" else event.tokens
            if event.kind == "restart":
                axes.axvline(x, color=color, linewidth=0.8, linestyle=":")
            elif math.isfinite(event.loss):
                axes.plot([x], [event.loss], color=color, marker=MARKS[event.kind], markersize=6)
            else:
                axes.plot(
                    [x],
                    [0.98],
                    color=color,
                    marker=MARKS[event.kind],
                    markersize=6,
                    transform=axes.get_xaxis_transform(),
                )


def thousands(value: float, _: int) -> str:
    """A tick of steps or tokens: 500, 20k, 1.5M."""
    for size, unit in ((1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"


def panel_svg(panel: Panel, results: Results) -> str | None:
    """A panel as SVG text, ``None`` if no run recorded its key."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    curves = panel_curves(panel, results)
    if not curves:
        return None
    with rc_context({"svg.hashsalt": panel.title}):
        figure = Figure(figsize=(5.2, 3.4), layout="constrained")
        draw(figure.subplots(), panel, curves, results)
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def save_overview(results: Results, path: Path) -> None:
    """Write the overview as a PNG."""
    overview(results).savefig(path, dpi=110)


def overview(results: Results) -> Any:
    """A figure with training loss, difference to the baseline, validation loss and speed."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    titles = ("Loss", "Difference to the baseline", "Validation", "Throughput and MFU")
    panels = [section.panels[0] for section in SECTIONS if section.title in titles]
    figure = Figure(figsize=(11, 7.2), layout="constrained")
    for axes, panel in zip(figure.subplots(2, 2).flat, panels, strict=True):
        curves = panel_curves(panel, results)
        if curves:
            draw(axes, panel, curves, results)
        else:
            say_missing(axes, panel)
    handles = [
        Line2D([], [], color=color, linestyle=dash, label=arm)  # pyright: ignore[reportArgumentType]
        for arm, (color, dash) in arm_styles(results).items()
    ]
    longest = max(len(str(handle.get_label())) for handle in handles)
    columns = max(1, min(4, len(handles), LEGEND_LETTERS // (longest + LINE_LETTERS)))
    figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=9)
    return figure
