"""Tools that take a recipe: overrides as in training, a caller's mistake in one line."""

import argparse
import runpy
from pathlib import Path

import pytest

from titan_lowprec.titan.recipe_tool import exit_status, parse_with_overrides

TOOLS = Path(__file__).resolve().parents[2] / "tools"
REQUIRED = {
    "dflash_eval": [],
    "dflash_export": ["--out", "unused"],
    "dflash_features": ["--out", "unused"],
    "dflash_time": [],
    "dry_run": [],
}


@pytest.mark.parametrize("separator", [[], ["--"]])
def test_what_a_tool_does_not_know_overrides_the_recipe(separator):
    parser = argparse.ArgumentParser()
    parser.add_argument("recipe")
    parser.add_argument("--rows", type=int)
    overrides = ["--training.steps", "6", "--loss.z_loss=0.1", "--metrics.no-enable_wandb"]
    options, left = parse_with_overrides(parser, ["r.toml", "--rows", "3", *separator, *overrides])
    assert (options.recipe, options.rows, left) == ("r.toml", 3, overrides)


def ending_with(error: Exception) -> int:
    raise error


def test_a_mistake_of_the_caller_ends_a_tool_with_its_message(capsys):
    message = "dflash.target_path: must be a step, got 'x'"
    assert exit_status(lambda: 0) == 0
    assert exit_status(lambda: ending_with(ValueError(message))) == 2
    assert capsys.readouterr().err == f"{message}\n"


@pytest.mark.parametrize("fault", [AssertionError, KeyError, TypeError, RuntimeError])
def test_a_fault_of_ours_keeps_its_traceback(fault):
    with pytest.raises(fault):
        exit_status(lambda: ending_with(fault("x")))


@pytest.mark.slow
@pytest.mark.parametrize("tool", REQUIRED)
def test_every_tool_takes_overrides_and_names_a_recipe_that_is_missing(tool, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")  # dflash_time then leaves the environment as it is
    arguments = ["nope.toml", *REQUIRED[tool], "--training.steps", "6"]
    monkeypatch.setattr("sys.argv", [tool, *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(TOOLS / f"{tool}.py"), run_name="__main__")
    assert ended.value.code == 2
    assert "the recipe must be a file, got 'nope.toml'" in capsys.readouterr().err


@pytest.mark.slow
def test_comparing_a_run_that_is_missing_names_it(tmp_path, monkeypatch, capsys):
    arguments = [str(tmp_path / "nope"), str(tmp_path), "--out", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["compare_runs", *arguments])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(TOOLS / "compare_runs.py"), run_name="__main__")
    assert ended.value.code == 2
    assert f"{tmp_path / 'nope'}: must be a run's dump folder" in capsys.readouterr().err
