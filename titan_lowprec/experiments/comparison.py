"""Any runs side by side: what they did, what differs in their configuration, what went wrong."""

import json
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from titan_lowprec.experiments.anomalies import Anomaly, anomalies
from titan_lowprec.experiments.figures import save_overview
from titan_lowprec.experiments.matrix import Arm, Matrix
from titan_lowprec.experiments.page import (
    document,
    html_list,
    html_table,
    legend,
    section_html,
)
from titan_lowprec.experiments.panels import SECTIONS
from titan_lowprec.experiments.report_table import MISSING, markdown_table, number, setting_rows
from titan_lowprec.experiments.resolution import NOT_IDENTITY, Run
from titan_lowprec.experiments.results import (
    History,
    ReadMetrics,
    Results,
    history_of,
    loss_at,
    summarise,
)
from titan_lowprec.experiments.run_state import RECIPE_FILE, STATE_FILE, State

HEADER = (
    "run",
    "steps",
    "valid tokens",
    "loss",
    "to the first run",
    "validation",
    "step time",
    "spikes",
    "skipped",
    "restarts",
    "commit",
)


def read_runs(folders: Sequence[Path], read: ReadMetrics) -> Results:
    """Runs by their dump folders; the first is the baseline of the others.

    Args:
        folders: Dump folders.
        read: The records of a ``metrics.jsonl`` that count.

    Raises:
        ValueError: A folder is no run's, or is named twice, or no run has records.
    """
    names = run_names(folders)
    runs = [
        Run(name, 0, settings_of(folder), "") for name, folder in zip(names, folders, strict=True)
    ]
    histories = [history_of(run, State("finished", ""), read) for run in runs]
    if not any(item.train for item in histories):
        raise ValueError(f"report: a run must have records, got none in {', '.join(names)}")
    matrix = Matrix(
        name="comparison",
        base=Path(),
        baselines=dict.fromkeys(names, names[0]),
        acceptable_difference=0.0,
        metric="train",
        seeds=(0,),
        data_order="fixed",
        arms=tuple(Arm(name, {}) for name in names),
    )
    return summarise(matrix, histories)


def settings_of(folder: Path) -> dict[str, Any]:
    """A run's resolved configuration, or the recipe that a sweep gave to one that never started.

    Raises:
        ValueError: The folder is no run's.
    """
    resolved = folder / "run" / "config.toml"
    config = resolved if resolved.is_file() else folder / RECIPE_FILE
    if not config.is_file():
        raise ValueError(f"{resolved}: must exist, is missing; name the dump folder of a run")
    settings = tomllib.loads(config.read_text())
    settings["job"]["dump_folder"] = str(folder)
    return settings


def outcome(folder: Path) -> str:
    """What a sweep noted of a run: its state and, if it failed, why."""
    path = folder / STATE_FILE
    state = json.loads(path.read_text()) if path.is_file() else {}
    return ": ".join(text for text in (state.get("status"), state.get("reason")) if text)


def run_names(folders: Sequence[Path]) -> list[str]:
    """The shortest ends of the paths that differ; a sweep's seedN-HASH follows its arm.

    Raises:
        ValueError: A folder is named twice.
    """
    paths = [folder.resolve().parts for folder in folders]
    if len(set(paths)) < len(paths):
        raise ValueError("report: folders must differ, got one twice; name it once")
    seeds = any(re.fullmatch(r"seed\d+-[0-9a-f]{8}", parts[-1]) for parts in paths if parts)
    for count in range(2 if seeds else 1, max(map(len, paths)) + 1):
        names = ["/".join(parts[-count:]) for parts in paths]
        if len(set(names)) == len(names):
            break
    return names


def comparison_rows(results: Results) -> list[tuple[str, ...]]:
    """A row per run, in the order of ``HEADER``; losses at the same number of valid tokens."""
    base = loss_at(results.matrix, results.histories[0], results.tokens)
    rows = []
    for item in results.histories:
        loss = loss_at(results.matrix, item, results.tokens)
        difference = None if loss is None or base is None else loss - base
        if item is results.histories[0]:
            difference = None
        kinds = [event.kind for event in anomalies(item.train)]
        rows.append(
            (
                item.run.arm,
                f"{item.train[-1]['step']}/{item.run.steps}" if item.train else MISSING,
                f"{item.train[-1]['valid_tokens_seen']:,}" if item.train else MISSING,
                number(loss, ".4f"),
                number(difference, "+.4f"),
                last_validation(item),
                step_time(item),
                *(str(kinds.count(kind)) for kind in ("spike", "skipped", "restart")),
                item.commit or "unknown",
            )
        )
    return rows


def last_validation(item: History) -> str:
    """Loss and step of the last round."""
    if not item.validation:
        return MISSING
    return f"{item.validation[-1]['loss']:.4f} (step {item.validation[-1]['step']})"


def step_time(item: History) -> str:
    """The median step."""
    times = [record["step_time_s"] for record in item.train if "step_time_s" in record]
    return f"{median(times):.3f} s" if times else MISSING


def comparison_notes(results: Results) -> list[str]:
    """How to read the table."""
    first = results.histories[0].run.arm
    unequal = [arm.arm for arm in results.arms if arm.same_batches is False]
    equal = [arm.arm for arm in results.arms if arm.same_batches and arm.arm != first]
    batches: list[str] = []
    if equal:
        batches.append(
            f"Saw the batches of {first} (fingerprints of all common steps): {', '.join(equal)}."
        )
    if unequal:
        batches.append(
            f"Other batches than {first}'s, so that the data add to the difference: "
            f"{', '.join(unequal)}."
        )
    return [
        f"Loss: training loss over the last {100 * results.matrix.tail_fraction:g} % of "
        f"{results.tokens:,} valid tokens, which every run with records reached; one run each says "
        "nothing of other seeds.",
        *batches,
        "Validation: each run's own last round, whose step stands beside it.",
        "Step time: median. Spikes: losses more than 0.1 nats and eight median absolute deviations "
        "above the median of the 50 steps before.",
    ]


def anomaly_lines(results: Results) -> list[str]:
    """Every event of every run, and how runs ended that did not reach their last step."""
    ends = [
        f"{item.run.arm}, {last}: ends before step {item.run.steps}"
        + (f", {text}" if (text := outcome(item.run.folder)) else "")
        for item in results.histories
        if (step := item.train[-1]["step"] if item.train else 0) < item.run.steps
        for last in (f"step {step}" if step else "no step",)
    ]
    return ends + [
        f"{item.run.arm}, {text}"
        for item in results.histories
        for text in event_lines(anomalies(item.train))
    ]


def event_lines(events: Sequence[Anomaly]) -> list[str]:
    """A line per event; skipped steps in a row are one."""
    lines: list[str] = []
    streaks: list[list[Anomaly]] = []
    for event in events:
        last = streaks[-1][-1] if streaks else event
        if event.kind == last.kind == "skipped" and event.step == last.step + 1:
            streaks[-1].append(event)
        else:
            streaks.append([event])
    for first, *rest in streaks:
        steps = f"steps {first.step} to {rest[-1].step}" if rest else f"step {first.step}"
        lines.append(f"{steps}: {first.kind}, {'first ' if rest else ''}{first.text}")
    return lines


def write_comparison(results: Results, to: Path) -> Path:
    """Write Markdown, picture and page.

    Args:
        results: ``read_runs``.
        to: Path of the files without ending.

    Returns:
        The page, which needs no other file and no network.
    """
    to.parent.mkdir(parents=True, exist_ok=True)
    image, text, page = (to.with_name(f"{to.name}.{end}") for end in ("png", "md", "html"))
    save_overview(results, image)
    rows, notes = comparison_rows(results), comparison_notes(results)
    events = anomaly_lines(results)
    settings = setting_rows(results, hidden=NOT_IDENTITY)
    parts = [
        "# " + ", ".join(item.run.arm for item in results.histories),
        markdown_table(HEADER, rows),
        "\n".join(f"- {line}" for line in notes),
        *(["## Events\n\n" + "\n".join(f"- {line}" for line in events)] if events else []),
        f"![Losses and their differences to the first run]({image.name})",
        "## Settings\n\n" + markdown_table(*settings),
    ]
    text.write_text("\n\n".join(parts) + "\n")
    body = [
        html_table(HEADER, rows, verdicts=False),
        html_list(notes),
        f"<h2>Events</h2>{html_list(events)}" if events else "",
        "<h2>Runs</h2>",
        legend(results),
        *(section_html(section, results) for section in SECTIONS),
        "<h2>Settings in which runs differ</h2>",
        html_table(*settings, verdicts=False),
    ]
    page.write_text(document("Comparison of runs", body))
    return page
