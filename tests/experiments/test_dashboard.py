"""The wandb dashboard without wandb's server."""

import re
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import titan_lowprec
from tests.experiments.conftest import AXES, HEAD
from titan_lowprec.experiments import dashboard
from titan_lowprec.experiments.panels import SECTIONS, TOKENS
from titan_lowprec.experiments.results import load_histories, summarise
from titan_lowprec.titan.metrics_file import read_metrics

PACKAGE = Path(titan_lowprec.__file__).parent
SPEC = dashboard.specification(entity="team", project="project", name="name")
PLOTS = {plot["title"]: plot for section in SPEC["sections"] for plot in section["panels"]}


def test_sections_are_those_of_the_local_report():
    assert [section["name"] for section in SPEC["sections"]] == [s.title for s in SECTIONS]
    assert len(PLOTS) == sum(len(section.panels) for section in SECTIONS)


def test_loss_is_plotted_against_tokens_and_steps():
    loss = [plot for plot in PLOTS.values() if plot.get("y") == ["loss_metrics/global_avg_loss"]]
    assert [plot["x"] for plot in loss] == ["valid_tokens_seen", "Step"]


def test_keys_with_a_common_beginning_are_matched_by_it():
    pattern = PLOTS["Output error"]["metric_regex"]
    assert re.match(pattern, "quantisation/output_error/layer0") and not re.match(pattern, "loss")


def test_every_mirrored_key_is_one_that_the_trainer_sends():
    source = (PACKAGE / "titan" / "metrics.py").read_text()
    health = (PACKAGE / "titan" / "health.py").read_text()
    for panel in (p for s in SECTIONS for p in s.panels if p.local.endswith("/largest")):
        assert f'"{panel.local.removesuffix("/largest")}' in health
    keys = {key for plot in PLOTS.values() for key in plot.get("y", [])}
    assert {key for key in keys if f'"{key}"' not in source} == {dashboard.DIFFERENCE_KEY}
    assert f'"{TOKENS}"' in source


def test_specification_is_what_wandb_workspaces_takes(monkeypatch):
    pytest.importorskip("wandb_workspaces", reason="pip install wandb-workspaces")
    monkeypatch.setenv("WANDB_MODE", "offline")
    from wandb_workspaces.reports import v2

    plots = [v2.LinePlot(**arguments) for arguments in PLOTS.values()]
    assert all(plot._to_model() for plot in plots)


def test_missing_package_is_named_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb_workspaces", None)
    monkeypatch.delitem(sys.modules, "wandb_workspaces.workspaces", raising=False)
    with pytest.raises(ValueError, match=r"pip install wandb wandb-workspaces, or use --dry-run"):
        dashboard.save_workspace(SPEC)


class Refusal(Exception):
    """Stands for wandb's own errors."""


@pytest.fixture
def wandb(monkeypatch):
    """Modules in the place of wandb and wandb-workspaces that keep what they are given."""
    wandb = ModuleType("wandb")
    wandb.errors = SimpleNamespace(Error=Refusal)
    wandb.Api = lambda: SimpleNamespace(default_entity="mine")
    wandb.saved = []

    class Workspace(SimpleNamespace):
        def save(self):
            wandb.saved.append(self)
            return SimpleNamespace(url="https://address")

    workspaces = ModuleType("wandb_workspaces.workspaces")
    workspaces.Section, workspaces.Workspace = SimpleNamespace, Workspace
    reports = ModuleType("wandb_workspaces.reports.v2")
    reports.LinePlot = SimpleNamespace
    for module in (wandb, workspaces, reports):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return wandb


@pytest.mark.parametrize("entity, owner", [("", "mine"), ("team", "team")])
def test_a_workspace_belongs_to_the_default_entity_where_none_is_named(wandb, entity, owner):
    specified = dashboard.specification(entity=entity, project="project", name="name")
    assert dashboard.save_workspace(specified) == "https://address"
    (saved,) = wandb.saved
    assert (saved.entity, saved.project) == (owner, "project")
    assert [section.name for section in saved.sections] == [s.title for s in SECTIONS]


def test_what_wandb_refuses_is_said_with_the_remedy(wandb, workshop):
    def refuse(**options):
        raise Refusal("No API key configured")

    wandb.Api = wandb.init = refuse
    remedy = r"Refusal: No API key configured; `wandb login` first, or use --dry-run"
    with pytest.raises(ValueError, match=remedy):
        dashboard.save_workspace(dashboard.specification(entity="", project="p", name="n"))
    for run in workshop.resolve():
        workshop.record(run, [5.0])
    results = summarise(
        workshop.matrix(HEAD + AXES), load_histories(workshop.resolve(), read_metrics)
    )
    with pytest.raises(ValueError, match=remedy):
        dashboard.log_differences(results, entity="", project="p", mode="online")


def test_differences_are_logged_as_runs_of_their_own(wandb, workshop):
    for run in workshop.resolve():
        workshop.record(run, [5.0, 4.0] if run.arm == "recipe=bf16" else [5.5, 4.25])
    matrix = workshop.matrix(HEAD + AXES)
    results = summarise(matrix, load_histories(workshop.resolve(), read_metrics))
    begun, logged = [], []

    def init(**options):
        begun.append((options["name"], options["group"], options["job_type"], options["mode"]))
        return SimpleNamespace(log=logged.append, finish=lambda: None)

    wandb.init = init
    count = dashboard.log_differences(results, entity="", project="p", mode="offline")
    assert count == 2
    assert begun[1] == ("recipe=mxfp8/seed1 - recipe=bf16", "sweep", "difference", "offline")
    assert logged[:2] == [
        {"difference/loss": 0.5, "valid_tokens_seen": 100.0},
        {"difference/loss": 0.25, "valid_tokens_seen": 200.0},
    ]
