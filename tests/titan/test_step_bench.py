"""The step benchmark's bookkeeping: which steps count for which row."""

import pytest
from torchtitan.config import ConfigManager

from tests.titan.benches import load_bench
from titan_lowprec.titan.check_config import find_problems


@pytest.fixture(scope="module")
def bench():
    return load_bench("step")


def line(step, time_s, memory_gib):
    return {
        "step": step,
        "step_time_s": time_s,
        "memory_gib": memory_gib,
        "mfu": 0.5,
        "data_wait_s": 0.003,
        "documents_per_row": 2.0,
    }


@pytest.mark.slow
def test_every_case_is_a_job_without_problems(bench):
    for case in bench.CASES.values():
        config = ConfigManager().parse_args(case.arguments())
        assert [*find_problems(config, device_type="cuda", world_size=1)] == []


def test_blocks_alternate_and_their_first_steps_are_left_out(bench):
    case = bench.CASES["2k-mxfp8-none"]
    size, warm = bench.BLOCK_STEPS, bench.WARM_STEPS
    lines = []
    for step in range(1, warm + 4 * size + 1):
        first = (step - warm - 1) % size == 0
        time_s = 9.0 if first or step <= warm else 0.3 if bench.is_eager(step, case) else 0.25
        lines.append(line(step, time_s, 40 + step))
    eager, graph = bench.summaries(lines, case)
    assert (eager["graph"], eager["step_ms"], eager["steps"]) == (False, 300.0, 2 * (size - 1))
    assert (graph["graph"], graph["step_ms"], graph["steps"]) == (True, 250.0, 2 * (size - 1))
    assert eager["memory_reserved_gib"] == 40 + warm
    assert graph["memory_reserved_gib"] == 40 + warm + size
    assert graph["tokens_per_s"] == 8 * 2048 * 4
    assert graph["data_wait_share"] == pytest.approx(0.012)


def test_a_case_without_a_graph_has_one_row(bench):
    case = bench.CASES["64k-mxfp8-op"]
    (row,) = bench.summaries([line(step, 1.0, 50) for step in range(1, 7)], case)
    assert (row["graph"], row["tokens_per_s"]) == (False, 65536)
