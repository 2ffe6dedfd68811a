"""Signals belong to the trainer while it trains, and to its caller after."""

import os
import signal
from types import SimpleNamespace

import pytest
from torchtitan.config import JobConfig

from titan_lowprec.titan.trainer import LowprecTrainer


@pytest.mark.parametrize("failure", [None, RuntimeError("a step failed")])
def test_the_handler_of_the_caller_is_back_after_training(monkeypatch, failure):
    wanted = []
    monkeypatch.setattr("titan_lowprec.titan.trainer.dist.get_world_size", lambda: 1)
    trainer = LowprecTrainer.__new__(LowprecTrainer)
    trainer.job_config, trainer.step, trainer.stop_requested = JobConfig(), 0, False
    trainer.outcomes = SimpleNamespace(drain_after_failure=lambda: None)
    trainer._resume = lambda: None

    def steps(profilers):
        os.kill(os.getpid(), signal.SIGTERM)
        wanted.append((trainer.stop_wanted, trainer.stop_requested))
        if failure is not None:
            raise failure

    trainer._all_steps = steps

    def mine(*_):
        wanted.append("mine")

    before = signal.signal(signal.SIGTERM, mine)
    try:
        if failure is None:
            trainer.train()
        else:
            with pytest.raises(RuntimeError, match="a step failed"):
                trainer.train()
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)
    assert wanted == [(True, True)]
