"""Parts of a step are measured without changing what the step computes, and add up to it."""

import os

import pytest
import torch

from titan_lowprec.titan.dflash import part_clock, timing
from titan_lowprec.titan.dflash.part_clock import PARTS, STEP, PartClock
from titan_lowprec.titan.dflash.timing import time_steps
from titan_lowprec.train import set_single_process_environment


@pytest.fixture
def single_process():
    before = dict(os.environ)
    set_single_process_environment()
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@pytest.fixture
def ticks(monkeypatch):
    """A clock whose reading is set by hand, in seconds."""
    now = [0.0]
    monkeypatch.setattr(part_clock.time, "perf_counter", lambda: now[0])
    return now


def test_a_part_is_the_median_over_steps_of_the_sum_of_its_calls(ticks):
    clock = PartClock(torch.device("cpu"))
    for durations in ((1, 2), (5, 6), (3, 3)):
        clock.begin_step()
        for duration in durations:
            clock.begin(timing.MASK)
            ticks[0] += duration
            clock.end(timing.MASK)
        ticks[0] += 10
        clock.end(STEP)
    mask, step = clock.parts()
    assert (mask.name, mask.time_ms, mask.calls) == (timing.MASK, 6000.0, 2)
    assert (step.name, step.time_ms, step.peak_gib) == (STEP, 16000.0, None)
    assert clock.step_ms() == (13000.0, 21000.0, 16000.0)
    clock.forget()
    assert clock.parts() == ()


def test_other_models_and_graphs_are_refused(parse):
    with pytest.raises(ValueError, match=r"graph\.enable = false"):
        time_steps(parse("--graph.enable"), steps=1, warmup=0, seconds=60.0)


@pytest.mark.slow
def test_measured_steps_have_the_losses_of_an_unwatched_run(
    parse, tmp_path, single_process, monkeypatch
):
    from contextlib import nullcontext

    def run(name, **options):
        config = parse(f"--data.cache_dir={tmp_path}")
        config.job.dump_folder = str(tmp_path / name)
        return time_steps(config, warmup=1, **options)

    watched = run("watched", steps=3, seconds=600.0)
    assert watched.steps == 3 and len(watched.losses) == 4
    parts = {part.name: part for part in watched.parts}
    assert set(parts) == set(PARTS)
    assert parts[timing.ATTENTION + timing.FORWARD].calls == 2
    assert parts[timing.ATTENTION + timing.BACKWARD].calls == 2
    assert all(part.time_ms > 0 for part in watched.parts)
    for outer, inner in (("draft layers", timing.ATTENTION), (STEP, "draft layers")):
        for direction in (timing.FORWARD, timing.BACKWARD):
            whole = parts[outer if outer == STEP else outer + direction]
            assert parts[inner + direction].time_ms < whole.time_ms
    # 4 used slots of 4 tokens in 48 tokens and 16 of blocks: at least the block is seen
    assert 4 / 64 < watched.visible < (47 + 4) / 64
    torch.distributed.destroy_process_group()
    monkeypatch.setattr(timing, "watching", lambda *_: nullcontext())
    monkeypatch.setattr(timing.PartClock, "end", lambda *_: None)
    monkeypatch.setattr(timing.PartClock, "parts", lambda _: ())
    monkeypatch.setattr(timing.PartClock, "step_ms", lambda _: ())
    assert run("plain", steps=3, seconds=600.0).losses == watched.losses
