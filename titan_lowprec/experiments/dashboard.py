"""The loss dashboard in wandb: a specification as plain data, and what sends it.

The panels are those of the local report. ``wandb`` and ``wandb-workspaces`` are imported only to
send something; a specification needs neither them nor a network.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from titan_lowprec.experiments.curves import panel_curves
from titan_lowprec.experiments.optional import need
from titan_lowprec.experiments.panels import SECTIONS, TOKENS, Panel
from titan_lowprec.experiments.results import Results

DIFFERENCE_KEY = "difference/loss"
_NEEDED = {
    "who": "dashboard",
    "remedy": "pip install wandb wandb-workspaces, or use --dry-run",
}


def specification(*, entity: str, project: str, name: str) -> dict[str, Any]:
    """The dashboard as plain data.

    Args:
        entity: User or team that owns the project; empty for the default one.
        project: The project that holds the runs.
        name: Title of the workspace.
    """
    return {
        "entity": entity,
        "project": project,
        "name": name,
        "sections": [
            {"name": section.title, "panels": [line_plot(panel) for panel in section.panels]}
            for section in SECTIONS
        ],
    }


def line_plot(panel: Panel) -> dict[str, Any]:
    """Arguments of wandb's ``LinePlot``."""
    keys = [key for key in panel.mirror if not key.endswith("/")]
    prefixes = [re.escape(key) for key in panel.mirror if key.endswith("/")]
    arguments: dict[str, Any] = {
        "title": panel.title,
        "x": "Step" if panel.axis == "step" else TOKENS,
        "title_x": "optimizer step" if panel.axis == "step" else "valid tokens",
        "title_y": panel.unit,
    }
    if keys:
        arguments["y"] = keys
    if prefixes:
        arguments["metric_regex"] = f"^({'|'.join(prefixes)})"
    return arguments


def save_workspace(specified: dict[str, Any]) -> str:
    """Create the workspace on the server.

    Returns:
        Its address.

    Raises:
        ValueError: wandb-workspaces is not installed, or wandb refuses.
    """
    wandb = need("wandb", **_NEEDED)
    workspaces = need("wandb_workspaces.workspaces", **_NEEDED)
    reports = need("wandb_workspaces.reports.v2", **_NEEDED)
    sections = [
        workspaces.Section(
            name=section["name"],
            panels=[reports.LinePlot(**arguments) for arguments in section["panels"]],
            is_open=True,
        )
        for section in specified["sections"]
    ]
    with in_one_line(wandb):
        saved = workspaces.Workspace(
            entity=specified["entity"] or wandb.Api().default_entity,
            project=specified["project"],
            name=specified["name"],
            sections=sections,
        ).save()
    return saved.url


def log_differences(results: Results, *, entity: str, project: str, mode: str) -> int:
    """Mirror each run's difference to its baseline, which wandb cannot compute across runs.

    Args:
        results: A computed table.
        entity: User or team; empty for the default one.
        project: The project of the sweep's runs.
        mode: wandb's mode, ``online`` or ``offline``.

    Returns:
        How many runs were logged.

    Raises:
        ValueError: wandb is not installed or refuses.
    """
    wandb = need("wandb", **_NEEDED)
    (panel,) = (p for s in SECTIONS for p in s.panels if p.kind == "difference")
    curves = [curve for curve in panel_curves(panel, results) if curve.seed is not None]
    for curve in curves:
        baseline = results.matrix.baselines[curve.arm]
        with in_one_line(wandb):
            run = wandb.init(
                entity=entity or None,
                project=project,
                group=results.matrix.name,
                job_type="difference",
                name=f"{curve.arm}/seed{curve.seed} - {baseline}",
                config={"arm": curve.arm, "seed": curve.seed, "baseline": baseline},
                mode=mode,
            )
        for tokens, difference in curve.points:
            run.log({DIFFERENCE_KEY: difference, TOKENS: tokens})
        run.finish()
    return len(curves)


@contextmanager
def in_one_line(wandb: Any) -> Iterator[None]:
    """What wandb refuses (no key, no access, no server) as an error that says what to do."""
    try:
        yield
    except wandb.errors.Error as error:
        raise ValueError(
            f"dashboard: wandb must take it, got {type(error).__name__}: {error}; `wandb login` "
            "first, or use --dry-run or --mode offline"
        ) from error
