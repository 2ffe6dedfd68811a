"""A sweep that ends half-way, by a signal or by a kill, and is resumed."""

import multiprocessing
import threading
import time

import pytest

from tests.experiments.conftest import HEAD, Workshop, kill_at_step, stop_at_step
from titan_lowprec.experiments.report_table import table_rows
from titan_lowprec.experiments.results import load_histories, summarise
from titan_lowprec.experiments.run_state import last_step, read_state
from titan_lowprec.experiments.runner import to_do
from titan_lowprec.titan.metrics_file import read_metrics

FOUR_ARMS = """
[axes]
"attention.recipe" = ["bf16", "mxfp8"]
"attention.scales" = ["token_block", "token"]
"""


def stop_sweep(workshop, runs, hanging):
    """Tell the sweep to stop, as Ctrl-C does, while a run hangs at step 2."""
    stop = threading.Event()
    threading.Thread(target=stop_at_step, args=(stop, hanging, 2)).start()
    workshop.sweep(runs, stop=stop, slots=2, behaviour={hanging.arm: "hang"})


def kill_sweep(workshop, runs, hanging):
    """Kill sweep and runs at once, as a machine that goes away does."""
    sweep = multiprocessing.get_context("fork").Process(
        target=workshop.sweep, args=(runs,), kwargs={"slots": 2, "behaviour": {hanging.arm: "hang"}}
    )
    sweep.start()
    while last_step(hanging.folder) < 2:
        time.sleep(0.01)
    sweep.kill()
    sweep.join()
    for run in runs:
        if read_state(run).status == "running":
            kill_at_step(run, 0)
    while any(read_state(run).status == "running" for run in runs):
        time.sleep(0.01)


@pytest.mark.slow
@pytest.mark.parametrize("end", [stop_sweep, kill_sweep])
def test_a_sweep_of_eight_runs_that_ends_half_way_and_is_resumed_has_the_unbroken_table(
    tmp_path, end
):
    text = HEAD.replace('"recipe=bf16"', '"recipe=bf16,scales=token"') + FOUR_ARMS
    tables = []
    for name in ("unbroken", "broken"):
        (tmp_path / name).mkdir()
        workshop = Workshop(tmp_path / name)
        runs = workshop.saved(text)
        assert len(runs) == 8
        if name == "broken":
            end(workshop, runs, runs[4])  # the third arm, so that others have finished
            states = [read_state(run).status for run in runs]
            assert "interrupted" in states and "finished" in states and "new" in states
        assert workshop.sweep(to_do(runs, retry_failed=False), slots=2)[0]
        results = summarise(workshop.matrix(text), load_histories(runs, read_metrics))
        tables.append(table_rows(results))
    assert tables[0] == tables[1]
    assert {row[2] for row in tables[0]} == {"2/2"} and len({row[3] for row in tables[0]}) == 4
