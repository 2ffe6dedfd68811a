"""Tables of evaluations, with differences and intervals by hand."""

import json
import math

import pytest

from titan_lowprec.experiments.evaluation import (
    LossResult,
    TaskResult,
    loss_difference,
    loss_report,
    loss_rows,
    mean_rows,
    task_report,
    task_rows,
    to_json,
)

BF16 = LossResult("bf16", 60, "native", (30.0, 20.0), (10, 5))
MXFP8 = LossResult("mxfp8", 60, "native", (31.0, 20.0), (10, 5))
EXACT = LossResult("mxfp8", 60, "fp32", (33.0, 21.0), (10, 5))


def test_loss_is_the_mean_over_tokens_not_over_batches():
    assert BF16.loss == 50 / 15


def test_difference_is_that_of_the_losses_and_its_interval_is_over_batches():
    difference = loss_difference(MXFP8, BF16)
    assert difference.mean == pytest.approx(MXFP8.loss - BF16.loss)
    assert difference.count == 2
    spread = math.sqrt(2) * (1 / 15)  # values 2/15 and 0
    assert difference.spread == pytest.approx(spread)


def test_rows_compare_with_the_own_native_and_with_the_first_run_under_equal_attention():
    first, second, third = loss_rows([BF16, MXFP8, EXACT])
    assert first[4:] == ("–",) * 4  # noqa: RUF001
    assert second[4] == "–" and second[6] == "+0.06667"  # noqa: RUF001
    assert third[4] == "+0.20000" and third[6] == "–"  # noqa: RUF001
    assert "15 valid tokens in 2 batches" in loss_report([BF16, MXFP8, EXACT])


def test_results_of_other_batches_are_refused():
    other = LossResult("x", 1, "native", (1.0, 1.0), (5, 10))
    with pytest.raises(ValueError, match=r"must come from the same batches"):
        loss_difference(BF16, other)


def task(model, task, *scores, metric="acc"):
    return TaskResult(model, task, metric, tuple(map(float, scores)))


def test_every_task_has_its_own_difference_paired_by_document():
    results = [
        task("a", "piqa", 1, 0, 1, 1),
        task("a", "arc", 1, 1),
        task("b", "piqa", 1, 1, 1, 0),
        task("b", "arc", 0, 1),
    ]
    rows = task_rows(results)
    assert [row[0] for row in rows] == ["arc", "arc", "piqa", "piqa"]
    assert rows[1][3:6] == ("b", "0.5000", "-0.5000")
    assert rows[3][3:6] == ("b", "0.7500", "+0.0000")
    assert rows[3][6] == "-1.2992 to +1.2992"  # t(3) 3.182 * 0.8165 / 2
    assert [row[3:5] for row in mean_rows(results)] == [("a", "0.8750"), ("b", "0.6250")]
    assert task_report(results, note="").index("arc") < task_report(results, note="").index("mean")


def test_other_documents_are_refused():
    with pytest.raises(ValueError, match=r"piqa must have the same documents .* got 2 and 1"):
        task_rows([task("a", "piqa", 1, 0), task("b", "piqa", 1)])


def test_json_holds_every_document():
    text = to_json([task("a", "piqa", 1, 0)], about={"command": ["x"]})
    assert json.loads(text)["results"][0]["scores"] == [1.0, 0.0]
