"""Matrix files: what they resolve to, and what is refused."""

import re
import tomllib
from dataclasses import replace

import pytest

from tests.experiments.conftest import AXES, HEAD
from titan_lowprec.experiments.resolution import config_hash, differing_keys
from titan_lowprec.experiments.run_state import load_runs, save_runs

TWO_AXES = AXES + '"attention.scales" = ["token_block", "token"]\n'
HEAD_2 = HEAD.replace("recipe=bf16", "recipe=bf16,scales=token_block")


def test_two_axes_and_two_seeds_become_eight_complete_runs(workshop):
    runs = workshop.resolve(HEAD_2 + TWO_AXES)
    assert [run.name for run in runs][:3] == [
        "recipe=bf16,scales=token_block/seed0",
        "recipe=bf16,scales=token_block/seed1",
        "recipe=bf16,scales=token/seed0",
    ]
    assert len(runs) == len({run.hash for run in runs}) == 8
    assert runs[0].config["attention"] == {
        "recipe": "bf16",
        "scales": "token_block",
        "weight_exponent": 8,  # a default, written out
    }
    assert differing_keys(runs)["recipe=mxfp8,scales=token"] == {
        "attention.recipe": "mxfp8",
        "attention.scales": "token",
    }


def test_seed_is_the_models_and_orders_the_same_data_for_every_arm(workshop):
    seeds = {
        run.name: (run.config["debug"]["seed"], run.config["data"]["seed"])
        for run in workshop.resolve()
    }
    assert seeds == {
        "recipe=bf16/seed0": (0, 0),
        "recipe=bf16/seed1": (1, 1),
        "recipe=mxfp8/seed0": (0, 0),
        "recipe=mxfp8/seed1": (1, 1),
    }
    fixed = workshop.resolve(HEAD.replace('"per_seed"', '"fixed"') + AXES)
    assert [run.config["data"]["seed"] for run in fixed] == [0, 0, 0, 0]


def test_excluded_point_is_left_out_and_included_arm_joins(workshop):
    text = (
        HEAD_2
        + TWO_AXES
        + '[[exclude]]\n"attention.recipe" = "bf16"\n"attention.scales" = ["token"]\n'
        + '[[include]]\nname = "c7"\nset = { attention.weight_exponent = 7 }\n'
    )
    arms = list(dict.fromkeys(run.arm for run in workshop.resolve(text)))
    assert arms == [
        "recipe=bf16,scales=token_block",
        "recipe=mxfp8,scales=token_block",
        "recipe=mxfp8,scales=token",
        "c7",
    ]


def test_choice_changes_several_keys_under_one_name(workshop):
    text = (
        HEAD.replace("recipe=bf16", "base")
        + "[choices.kind]\nbase = {}\n"
        + 'both = { "attention.recipe" = "mxfp8", "attention.weight_exponent" = 7 }\n'
    )
    run = workshop.resolve(text)[-1]
    assert (run.arm, run.config["attention"]["recipe"]) == ("both", "mxfp8")
    assert run.config["attention"]["weight_exponent"] == 7


def test_set_changes_every_arm_and_an_arm_wins_over_it(workshop):
    runs = workshop.resolve(
        HEAD + '[set]\n"training.steps" = 3\n"attention.recipe" = "nvfp4_full"\n' + AXES
    )
    assert {run.steps for run in runs} == {3}
    assert {run.config["attention"]["recipe"] for run in runs} == {"bf16", "mxfp8"}


def test_hash_ignores_where_a_run_writes_and_sees_what_it_computes(workshop):
    config = workshop.resolve()[0].config
    moved = {**config, "job": {**config["job"], "dump_folder": "y", "description": "z"}}
    other = {**config, "attention": {**config["attention"], "weight_exponent": 7}}
    assert config_hash(moved, processes=1) == config_hash(config, processes=1)
    assert config_hash(other, processes=1) != config_hash(config, processes=1)
    assert config_hash(config, processes=2) != config_hash(config, processes=1)


def test_folder_carries_the_hash_so_that_a_changed_arm_is_a_new_run(workshop):
    before = workshop.resolve()[0]
    after = workshop.resolve(HEAD + '[set]\n"training.steps" = 6\n' + AXES)[0]
    assert before.folder.name == f"seed0-{before.hash[:8]}"
    assert before.folder != after.folder


def test_saved_recipes_load_as_the_same_runs(workshop):
    runs = workshop.resolve()
    folder = workshop.folder / "out" / "sweep"
    save_runs(runs, folder)
    assert load_runs(folder) == runs
    assert tomllib.loads((runs[0].folder / "recipe.toml").read_text()) == runs[0].config


def test_a_sweep_that_was_moved_is_read_where_it_lies(workshop):
    runs = workshop.saved()
    moved = (workshop.folder / "out" / "sweep").rename(workshop.folder / "elsewhere")
    loaded = load_runs(moved)
    assert [run.name for run in loaded] == [run.name for run in runs]
    assert all(run.folder.is_relative_to(moved) and run.folder.is_dir() for run in loaded)


def test_report_of_a_sweep_that_never_started_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"runs\.json: must list the sweep's runs"):
        load_runs(tmp_path)


REFUSED = {
    "unknown table": (HEAD + AXES + "[axis]\n", r"tables must be among .*got \['axis'\]"),
    "unknown key": (HEAD + "sed = 1\n" + AXES, r"keys of \[matrix\] must be among .*'sed'"),
    "missing key": (HEAD.replace("seeds = [0, 1]\n", "") + AXES, "matrix.seeds must be a list"),
    "equal seeds": (HEAD.replace("[0, 1]", "[1, 1]") + AXES, r"different integers.*\[1, 1\]"),
    "negative difference": (HEAD.replace("0.05", "-0.05") + AXES, "at least 0, got -0.05"),
    "not a number": (HEAD.replace("0.05", "true") + AXES, "a number of nats.*got True"),
    "unknown baseline": (
        HEAD.replace("=bf16", "=fp32") + AXES,
        "baseline must name one of .*for recipe=bf16",
    ),
    "unknown recipe key": (
        HEAD + '[set]\n"attention.tau" = 1\n' + AXES,
        "arm .*attention.tau must",
    ),
    "no section": (HEAD + "[set]\nsteps = 1\n" + AXES, "keys must be section.key, got 'steps'"),
    "same value twice": (HEAD + '[axes]\n"attention.recipe" = ["bf16", "bf16"]\n', "names must di"),
    "default spelled out": (
        HEAD + AXES + '[[include]]\nname = "c8"\nset = { "attention.weight_exponent" = 8 }\n',
        "arms must differ, got recipe=bf16/seed0 and c8/seed0 with equal configurations",
    ),
    "one number in two spellings": (
        HEAD.replace("recipe=bf16", "weight_exponent=7")
        + '[axes]\n"attention.weight_exponent" = [7, 7.0]\n',
        "arms must differ, got weight_exponent=7/seed0 and weight_exponent=7.0/seed0",
    ),
    "equal names": (HEAD + AXES + '[[include]]\nname = "recipe=bf16"\n', "names must differ"),
    "bad name": (HEAD + AXES + '[[include]]\nname = "a/b"\n', "must match .*got 'a/b'"),
    "exclude of nothing": (
        HEAD + AXES + '[[exclude]]\n"attention.recipe" = "fp32"\n',
        "each must match an arm",
    ),
    "exclude of no axis": (HEAD + AXES + '[[exclude]]\n"loss.impl" = "x"\n', "among the axes"),
    "empty exclude": (HEAD + AXES + "[[exclude]]\n", "name axes and their values"),
    "seed as axis": (HEAD + AXES + '"data.seed" = [1, 2]\n', "sweep itself must set .*data.seed"),
    "folder in set": (HEAD + '[set]\n"job.dump_folder" = "x"\n' + AXES, "job.dump_folder"),
    "axis of lists": (HEAD + AXES + '"data.paths" = [["a"], ["b"]]\n', r"name others in \[choices"),
    "axis of one": (HEAD + AXES + '"data.packer" = "concat"\n', "must be a list of values"),
    "set of a value": ("set = 3\n" + HEAD + AXES, "set must be a table, got 3"),
    "matrix twice": (HEAD.replace("[matrix]", "[[matrix]]") + AXES, "matrix must be a table"),
    "axes twice": (HEAD + "[[axes]]\nx = [1]\n", "axes must be a table"),
    "choices of a value": (HEAD + AXES + "[choices]\nx = 3\n", "choices must be a table of tables"),
    "choice of a value": (
        HEAD + AXES + "[choices.x]\na = 3\n",
        "choices must be a table of tables",
    ),
    "choices without labels": (HEAD + AXES + "[choices.x]\n", "must have labels, got none for .*x"),
    "include once": (HEAD + AXES + '[include]\nname = "x"\n', "include must be a list of tables"),
    "exclude once": (HEAD + AXES + "[exclude]\nx = 1\n", "exclude must be a list of tables"),
    "name of a number": (HEAD + AXES + "[[include]]\nname = 3\n", "name must be a string"),
    "no arms": (HEAD, "a matrix must have arms, got none"),
    "infinite difference": (HEAD.replace("0.05", "inf") + AXES, "a number of nats.*got inf"),
    "key under a value": (
        HEAD + '[set]\n"training.steps.more" = 1\n' + AXES,
        "must lie in tables, got 'training.steps.more'",
    ),
    "nan in a recipe": (
        HEAD + '[set]\n"attention.weight_exponent" = nan\n' + AXES,
        "recipe=bf16: ",
    ),
    "key of two axes": (
        HEAD.replace("recipe=bf16", "recipe=bf16,a")
        + AXES
        + '[choices.x]\na = {}\nb = { "attention.recipe" = "fp32" }\n',
        "by one axis, got attention.recipe set by attention.recipe and x",
    ),
    **{
        f"arm called {name}": (
            HEAD + AXES + f'[[include]]\nname = "{name}"\n',
            "not be those of the sweep's own files",
        )
        for name in ("jobs", "runs.json", "plan.json", "report.html")
    },
    "broken TOML": ("[matrix\n", "must be TOML, got a syntax error"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_faulty_matrix_is_refused_with_the_reason(workshop, case):
    text, reason = REFUSED[case]
    with pytest.raises(ValueError, match=re.compile(reason, re.S)):
        workshop.resolve(text)


def test_baseline_by_label_is_the_neighbour_along_that_axis(workshop):
    head = HEAD.replace('"recipe=bf16"', '{ "attention.recipe" = "bf16" }')
    assert workshop.matrix(head + TWO_AXES).baselines == {
        "recipe=bf16,scales=token_block": "recipe=bf16,scales=token_block",
        "recipe=bf16,scales=token": "recipe=bf16,scales=token",
        "recipe=mxfp8,scales=token_block": "recipe=bf16,scales=token_block",
        "recipe=mxfp8,scales=token": "recipe=bf16,scales=token",
    }
    missing = '[[exclude]]\n"attention.recipe" = "bf16"\n"attention.scales" = "token"\n'
    with pytest.raises(ValueError, match="gives none for recipe=mxfp8,scales=token;"):
        workshop.matrix(head + TWO_AXES + missing)


def test_read_matrix_is_a_value_with_floats(workshop):
    matrix = workshop.matrix(HEAD.replace("0.05", "1") + AXES)
    assert isinstance(matrix.acceptable_difference, float)
    assert replace(matrix) == matrix and matrix.tail_fraction == 0.1
