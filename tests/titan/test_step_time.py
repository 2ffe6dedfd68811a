"""The model of step time on many GPUs, against sums worked out by hand."""

import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest

from titan_lowprec.titan.step_time import MeasuredParts, ShardedModel, markdown_table, predict

PARTS = MeasuredParts(
    compute_s=0.25, sharding_s=0.02, update_s=0.04, fixed_s=0.01, link_rate=100e9,
    network_rate=10e9, hop_s=0.0,
)  # fmt: skip
MODEL = ShardedModel(
    parameters=1_000_000_000, first_group=100_000_000, groups=10, gathers=2, gather_bytes=2,
    reduce_bytes=4,
)  # fmt: skip


def predicted(parts=PARTS, model=MODEL, **changes):
    sizes = {
        "gpus": 4, "shards": 4, "gpus_per_host": 8, "rows_per_step": 64, "rows_per_microbatch": 8,
        "tokens_per_row": 2048,
    }  # fmt: skip
    return predict(parts, model, **{**sizes, **changes})


def test_one_gpu_communicates_nothing():
    one = predicted(gpus=1, shards=1)
    assert one.communication_s == one.exposed_s == 0.0
    assert one.step_s == pytest.approx(8 * 0.25 + 0.04 + 0.01)
    assert one.efficiency == pytest.approx(1.0)
    assert one.tokens_per_second == pytest.approx(64 * 2048 / 2.05)


def test_hidden_communication_leaves_the_first_gather_and_the_last_reduction():
    four = predicted()
    # gather 2 GB x 3/4 at 100 GB/s = 15 ms, twice; reduce 4 GB x 3/4 = 30 ms; a tenth shows
    assert four.communication_s == pytest.approx(0.060)
    assert four.exposed_s == pytest.approx(0.0045)
    assert four.step_s == pytest.approx(2 * (0.25 + 0.02 + 0.0045) + 0.04 / 4 + 0.01)


def test_kept_weights_are_gathered_once():
    once = predicted(model=dataclasses.replace(MODEL, gathers=1))
    assert once.communication_s == pytest.approx(0.045)
    assert once.exposed_s == predicted().exposed_s  # hidden before


def test_communication_beyond_the_compute_is_exposed():
    slow = predicted(gpus=16, shards=16, rows_per_step=128)
    # across hosts: (2 x 2 + 4) GB x 15/16 at 10 GB/s = 750 ms beside 250 ms of compute
    assert slow.communication_s == pytest.approx(0.75)
    first_and_last = (2 + 4) * 15 / 16 / 10 / 10
    assert slow.exposed_s == pytest.approx(first_and_last + 0.75 - first_and_last - 0.25)


def test_replicas_reduce_a_shard_once_a_step():
    wide = predicted(gpus=16, shards=8, rows_per_step=128)
    gather, reduce = 2 * 7 / 8 / 100, 4 * 7 / 8 / 100
    replicate = 2 * (4 / 8) * (1 / 2) / 10
    expected = 0.25 + 0.02 + (gather + reduce) / 10 + replicate + 0.04 / 8 + 0.01
    assert wide.step_s == pytest.approx(expected)


def test_every_hop_of_every_group_costs_its_latency():
    hops = dataclasses.replace(PARTS, hop_s=1e-3)
    assert predicted(hops).communication_s == pytest.approx(0.060 + 3 * 10 * 3 * 1e-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rows_per_step": 60}, "multiple of gpus . rows_per_microbatch = 32, got 60"),
        ({"shards": 3}, "multiple of shards = 3, got 4"),
    ],
)
def test_impossible_sizes_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        predicted(**changes)


def test_table_has_a_row_a_prediction():
    lines = markdown_table([predicted(), predicted(gpus=8, shards=8)]).splitlines()
    assert [line.split("|")[1].strip() for line in lines[2:]] == ["4", "8"]


def test_the_tool_gives_back_the_two_gpus_that_it_was_fitted_to():
    """252.4 ms for 16 rows, over half of one GPU's 482.2: 95.5 %."""
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "tools/predict_scaling.py", "--rows", "512"]
    printed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    two = next(line for line in printed.splitlines() if line.startswith("| 2 |"))
    step_ms = float(two.split("|")[5].strip().removesuffix(" ms").replace(",", ""))
    update_ms = 1e3 * 10 * 4 * 1_498_482_688 / 4.26e12
    assert step_ms == pytest.approx(32 * (252.4 - update_ms / 2) + update_ms / 2, rel=1e-3)


def test_the_published_tables_are_what_the_tool_prints():
    root = Path(__file__).resolve().parents[2]
    command = [sys.executable, "tools/predict_scaling.py"]
    printed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    assert printed.strip() in (root / "recipes" / "llama1b_scaling.md").read_text()
