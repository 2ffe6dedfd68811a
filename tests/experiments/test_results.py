"""The table: equal tokens, paired differences, intervals, verdicts, failures."""

import json
import math

import pytest

from tests.experiments.conftest import AXES, HEAD
from titan_lowprec.experiments.estimates import estimate, t_quantile
from titan_lowprec.experiments.plan import plan_note, state_plan
from titan_lowprec.experiments.report_table import notes, table_rows
from titan_lowprec.experiments.results import (
    common_tokens,
    interpolate,
    load_histories,
    summarise,
    tail_mean,
)
from titan_lowprec.titan.metrics_file import read_metrics

THREE = HEAD.replace("[0, 1]", "[0, 1, 2]").replace('"train"', '"train"\ntail_fraction = 0.2')


def results_of(workshop, text=HEAD + AXES):
    matrix = workshop.matrix(text)
    return summarise(matrix, load_histories(workshop.resolve(text), read_metrics))


def record_all(workshop, losses, text=HEAD + AXES, **options):
    """Every run's five steps end with the loss that ``losses`` has for its name."""
    for run in workshop.resolve(text):
        if run.name in losses:
            workshop.record(run, [9.0, 8.0, 7.0, 6.0, losses[run.name]], **options)


def arm(results, name):
    return next(row for row in results.arms if row.arm == name)


@pytest.mark.parametrize(
    ("freedom", "value"),
    [(1, 12.706), (2, 4.303), (3, 3.182), (4, 2.776), (9, 2.262), (30, 2.042), (120, 1.980)],
)
def test_t_quantiles_are_the_published_ones(freedom, value):
    assert t_quantile(0.975, freedom) == pytest.approx(value, abs=5e-4)


def test_interval_of_three_values_worked_by_hand():
    result = estimate([1.0, 2.0, 3.0])
    assert (result.mean, result.spread) == (2.0, 1.0)
    assert result.low == pytest.approx(2 - 4.30265 / math.sqrt(3), abs=1e-5)
    assert result.high == pytest.approx(2 + 4.30265 / math.sqrt(3), abs=1e-5)


def test_one_value_has_no_spread_and_no_interval():
    result = estimate([1.5])
    assert (result.mean, result.spread, result.low, result.high) == (1.5, None, None, None)


def test_differences_are_paired_by_seed_so_seed_noise_cancels(workshop):
    losses = {f"recipe=bf16/seed{s}": 3.0 + s for s in range(3)}
    losses |= {f"recipe=mxfp8/seed{s}": 3.01 + s for s in range(3)}
    record_all(workshop, losses, THREE + AXES)
    row = arm(results_of(workshop, THREE + AXES), "recipe=mxfp8")
    assert row.loss.mean == pytest.approx(4.01) and row.loss.spread == pytest.approx(1.0)
    assert row.difference.mean == pytest.approx(0.01)
    assert row.difference.high == pytest.approx(0.01)
    assert (row.verdict, row.same_batches, row.finished) == ("acceptable", True, 3)


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ((0.00, 0.001), "acceptable"),
        ((0.20, 0.201), "not acceptable"),
        ((0.00, 0.05), "undecided"),
        ((-0.2, 0.2), "undecided"),
        ((math.nan, 0.0), "not acceptable (loss not finite)"),
    ],
)
def test_verdict_needs_the_whole_interval_on_one_side(workshop, changes, verdict):
    losses = {"recipe=bf16/seed0": 3.0, "recipe=bf16/seed1": 4.0}
    losses |= {f"recipe=mxfp8/seed{s}": 3.0 + s + changes[s] for s in (0, 1)}
    record_all(workshop, losses)
    assert arm(results_of(workshop), "recipe=mxfp8").verdict == verdict


LIMIT = 0.25  # of which differences of the losses below are exact
BOUNDARY = {
    "at the limit": ((LIMIT, LIMIT), "acceptable"),
    "an ulp above": ((LIMIT + 2**-51,) * 2, "not acceptable"),
    "an ulp below": ((LIMIT - 2**-51,) * 2, "acceptable"),
    "around it": ((LIMIT - 2**-51, LIMIT + 2**-51), "undecided"),
}


@pytest.mark.parametrize("case", BOUNDARY)
def test_verdict_at_the_boundary_of_the_acceptable_difference(workshop, case):
    changes, verdict = BOUNDARY[case]
    text = HEAD.replace("0.05", str(LIMIT)) + AXES
    losses = {f"recipe=bf16/seed{s}": 2.0 for s in (0, 1)}
    losses |= {f"recipe=mxfp8/seed{s}": 2.0 + changes[s] for s in (0, 1)}
    record_all(workshop, losses, text)
    assert arm(results_of(workshop, text), "recipe=mxfp8").verdict == verdict


def test_verdict_says_for_how_many_seeds_the_baseline_has_a_number(workshop):
    losses = {f"recipe={name}/seed{s}": 3.0 for name in ("bf16", "mxfp8") for s in range(3)}
    del losses["recipe=bf16/seed2"]
    record_all(workshop, losses, THREE + AXES)
    row = arm(results_of(workshop, THREE + AXES), "recipe=mxfp8")
    assert row.verdict == "acceptable (2 of 3 pairs)" and row.difference.count == 2


def test_one_seed_decides_nothing(workshop):
    text = HEAD.replace("[0, 1]", "[0]") + AXES
    record_all(workshop, {"recipe=bf16/seed0": 3.0, "recipe=mxfp8/seed0": 3.0}, text)
    assert arm(results_of(workshop, text), "recipe=mxfp8").verdict == "undecided (one seed)"


def test_failed_seed_is_shown_with_its_reason_and_spoils_the_verdict(workshop):
    good = {"recipe=bf16/seed0": 3.0, "recipe=bf16/seed1": 3.0, "recipe=mxfp8/seed0": 3.0}
    record_all(workshop, good)
    workshop.record(workshop.resolve()[3], [9.0, math.inf], status="failed", reason="cabbage")
    results = results_of(workshop)
    row = arm(results, "recipe=mxfp8")
    assert row.verdict == "failed (1 of 2 seeds)"
    assert row.problems == ("seed 1: failed, cabbage",)
    assert results.tokens == 500  # the failed run does not shorten the comparison
    assert table_rows(results)[1][:3] == ("recipe=mxfp8", "failed (1 of 2 seeds)", "1/2")


def test_unfinished_and_new_runs_make_an_arm_incomplete(workshop):
    record_all(workshop, {"recipe=bf16/seed0": 3.0, "recipe=bf16/seed1": 3.0})
    workshop.record(workshop.resolve()[2], [9.0], status="interrupted")
    row = arm(results_of(workshop), "recipe=mxfp8")
    assert row.verdict == "incomplete (0 of 2 seeds)" and row.difference is None
    assert row.problems == ("seed 0: interrupted at step 1 of 5", "seed 1: new")


def test_arms_are_compared_at_the_tokens_that_all_reached(workshop):
    runs = workshop.resolve(THREE + AXES)
    for run in runs:
        more = run.arm == "recipe=mxfp8"
        workshop.record(run, [5.0, 4.0, 3.0, 2.0, 1.0], tokens=200 if more else 100)
    results = results_of(workshop, THREE + AXES)
    assert results.tokens == 500
    assert arm(results, "recipe=bf16").loss.mean == 1.0  # step 5 alone lies in (400, 500]
    assert arm(results, "recipe=mxfp8").loss is None  # step 2 is at 400, step 3 at 600


def test_tail_mean_weighs_steps_by_their_valid_tokens():
    train = [
        {"loss": 9.0, "valid_tokens": 50, "valid_tokens_seen": 50},
        {"loss": 4.0, "valid_tokens": 30, "valid_tokens_seen": 80},
        {"loss": 2.0, "valid_tokens": 10, "valid_tokens_seen": 90},
    ]
    assert tail_mean(train, 90, 0.4) == pytest.approx((4 * 30 + 2 * 10) / 40)


def test_interpolation_is_exact_at_points_linear_between_and_absent_outside():
    points = [(10.0, 3.0), (20.0, 2.0)]
    assert [interpolate(points, x) for x in (10.0, 15.0, 20.0)] == [3.0, 2.5, 2.0]
    assert interpolate(points, 9.0) is None and interpolate(points, 21.0) is None


def test_validation_metric_is_read_at_the_last_round_all_have(workshop):
    text = HEAD.replace('"train"', '"validation"') + AXES
    for run in workshop.resolve(text):
        workshop.record(run, [9.0] * 5)
        with (run.folder / "metrics.jsonl").open("a") as file:
            for step, loss in ((2, 6.0), (4, 4.0)):
                line = {"kind": "validation", "step": step, "loss": loss + run.seed, "tokens": 7}
                file.write(json.dumps(line) + "\n")
    results = results_of(workshop, text)
    assert results.tokens == 400
    assert arm(results, "recipe=mxfp8").loss.mean == 4.5


def test_each_arm_is_compared_with_its_own_baseline(workshop):
    head = HEAD.replace('"recipe=bf16"', '{ "attention.recipe" = "bf16" }')
    text = head + AXES + '"attention.weight_exponent" = [7, 8]\n'
    losses = {"bf16,weight_exponent=7": 3.0, "mxfp8,weight_exponent=7": 3.1}
    losses |= {"bf16,weight_exponent=8": 2.0, "mxfp8,weight_exponent=8": 2.3}
    named = {f"recipe={arm}/seed{s}": loss for arm, loss in losses.items() for s in (0, 1)}
    record_all(workshop, named, text)
    results = results_of(workshop, text)
    assert [row.difference and round(row.difference.mean, 9) for row in results.arms] == [
        None,
        None,
        0.1,
        0.3,
    ]
    assert any("mxfp8,weight_exponent=7 with recipe=bf16" in note for note in notes_of(results))


def test_other_batches_than_the_baselines_are_said(workshop):
    for run in workshop.resolve():
        workshop.record(run, [3.0] * 5, fingerprint="b" if run.arm == "recipe=mxfp8" else "a")
    results = results_of(workshop)
    assert arm(results, "recipe=mxfp8").same_batches is False
    assert any("Other batches" in note and "recipe=mxfp8" in note for note in notes_of(results))


def notes_of(results):
    return notes(results, results.matrix.base.parent)


def test_a_baseline_that_diverged_is_not_held_against_the_arm(workshop):
    losses = {f"recipe=bf16/seed{s}": math.nan for s in range(2)}
    losses |= {f"recipe=mxfp8/seed{s}": 3.0 for s in range(2)}
    record_all(workshop, losses)
    row = arm(results_of(workshop), "recipe=mxfp8")
    assert row.verdict == "undecided (the baseline's loss is not finite)"


def test_an_arm_that_diverged_is_not_acceptable(workshop):
    losses = {f"recipe=bf16/seed{s}": 3.0 for s in range(2)}
    losses |= {f"recipe=mxfp8/seed{s}": math.inf for s in range(2)}
    record_all(workshop, losses)
    row = arm(results_of(workshop), "recipe=mxfp8")
    assert row.verdict == "not acceptable (loss not finite)"


@pytest.mark.parametrize("bad", [(math.inf, -math.inf), (math.inf, math.nan), (-math.inf, 1.0)])
def test_infinite_values_of_any_sign_have_an_estimate_without_interval(bad):
    result = estimate([1.0, *bad])
    assert not math.isfinite(result.mean) and (result.spread, result.low) == (None, None)


def test_seeds_that_diverge_in_the_arm_and_in_the_baseline_leave_a_table(workshop):
    losses = {"recipe=bf16/seed0": math.inf, "recipe=bf16/seed1": 3.0}
    losses |= {"recipe=mxfp8/seed0": 3.0, "recipe=mxfp8/seed1": math.inf}
    record_all(workshop, losses)
    row = arm(results_of(workshop), "recipe=mxfp8")
    assert row.verdict == "undecided (the baseline's loss is not finite)"


GROWN = {
    "an arm more": (HEAD + AXES.replace('"mxfp8"]', '"mxfp8", "fp32"]'), "recipe=fp32", [0, 1]),
    "a seed more": (HEAD.replace("[0, 1]", "[0, 1, 2]") + AXES, "recipe=mxfp8", [2]),
    "another setting": (HEAD + '[set]\n"training.steps" = 6\n' + AXES, "recipe=mxfp8", [0, 1]),
}


@pytest.mark.parametrize("case", GROWN)
def test_runs_from_before_the_matrix_changed_decide_nothing_about_it(workshop, case):
    old = workshop.resolve()
    for run in old:
        workshop.record(run, [9.0, 8.0, 7.0, 6.0, 3.0])
    text, name, missing = GROWN[case]
    results = summarise(workshop.matrix(text), load_histories(old, read_metrics))
    row = arm(results, name)
    assert row.verdict.startswith("incomplete")
    lines = [f"seed {seed}: no run of the matrix as it is now" for seed in missing]
    assert list(row.problems) == lines


def test_arm_that_left_the_matrix_is_in_neither_table_nor_curves(workshop):
    wide = HEAD + AXES.replace('"mxfp8"]', '"mxfp8", "fp32"]')
    old = workshop.resolve(wide)
    for run in old:
        workshop.record(run, [9.0, 8.0, 7.0, 6.0, 3.0])
    results = summarise(workshop.matrix(), load_histories(old, read_metrics))
    assert {item.run.arm for item in results.histories} == {"recipe=bf16", "recipe=mxfp8"}
    assert [row.arm for row in results.arms] == ["recipe=bf16", "recipe=mxfp8"]


def test_commit_says_that_files_had_changed(workshop):
    for number, run in enumerate(workshop.resolve()):
        workshop.record(run, [3.0] * 5)
        (run.folder / "run").mkdir()
        versions = {"commit": "0123456789abcdef", "dirty": number == 3}
        (run.folder / "run" / "versions.json").write_text(json.dumps(versions))
    lines = notes_of(results_of(workshop))
    assert "Commit: 0123456789ab, 0123456789ab-dirty." in lines
    assert any(line.startswith("Dirty: ") for line in lines)


def test_batches_that_nobody_recorded_are_not_called_equal(workshop, tmp_path):
    lines = notes(results_of(workshop), tmp_path)
    assert not any("saw the baseline's batches" in line for line in lines)
    assert any(line.startswith("No run says yet which batches") for line in lines)


def test_nothing_finished_gives_a_table_without_numbers(workshop):
    results = results_of(workshop)
    assert common_tokens(results.matrix, results.histories) == 0
    assert [row[1] for row in table_rows(results)] == ["incomplete (0 of 2 seeds)"] * 2


def test_rule_that_changed_after_the_first_run_is_said(workshop, tmp_path):
    matrix = workshop.matrix()
    assert "not recorded" in plan_note(matrix, tmp_path)
    state_plan(matrix, tmp_path)
    assert "has not changed" in plan_note(matrix, tmp_path)
    looser = workshop.matrix(HEAD.replace("0.05", "0.5") + AXES)
    state_plan(looser, tmp_path)
    assert "CHANGED since: acceptable_difference from 0.05 to 0.5" in plan_note(looser, tmp_path)
