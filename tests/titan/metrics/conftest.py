"""Fixtures of the metrics tests: a small configuration, a step's record, and a processor of it."""

import dataclasses
import json

import pytest
import torch.nn as nn
from torchtitan.config import ConfigManager, JobConfig
from torchtitan.distributed import ParallelDims

from titan_lowprec.titan import job_config, metrics
from titan_lowprec.titan.llama3.args import LowprecLlamaArgs
from titan_lowprec.titan.metrics import StepRecord, build_metrics_processor

CONFIG = ConfigManager._merge_configs(JobConfig, job_config.JobConfig)
RECORD = StepRecord(
    step=1,
    loss=2.5,
    grad_norm=1.25,
    lr=1e-3,
    tokens_seen=16,
    valid_tokens_seen=6,
    valid_tokens=6,
    rows=2,
    documents=2,
    padding_tokens=8,
    attention_pairs=21,
    skipped_steps=0,
    fingerprint="00000000000000ff",
    data_wait_s=0.25,
)


@pytest.fixture
def record():
    """``record(step, **changes)`` is a step's record: two documents of 3 and 5 tokens in two rows
    of 8."""

    def record(step, **changes):
        return dataclasses.replace(RECORD, step=step, **changes)

    return record


@pytest.fixture
def config(tmp_path):
    config = CONFIG()
    config.job.dump_folder = str(tmp_path)
    config.training.steps = 10
    config.training.seq_len = 8
    config.metrics.log_freq = 5
    config.metrics.disable_color_printing = True
    return config


@pytest.fixture
def build(config):
    built = []

    def build():
        degrees = dict.fromkeys(("dp_replicate", "cp", "tp", "pp", "ep", "etp"), 1)
        dims = ParallelDims(**degrees, dp_shard=2, world_size=2)
        args = LowprecLlamaArgs(dim=32, n_heads=2, n_layers=2)  # heads of 16
        processor = build_metrics_processor(config, dims, args)
        processor.model_parts = [nn.Linear(10, 100)]
        built.append(processor)
        return processor

    yield build
    for processor in built:
        processor.close()


@pytest.fixture
def clock(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: now[0])

    def advance(seconds):
        now[0] += seconds

    return advance


@pytest.fixture
def lines(tmp_path):
    """``lines()`` are all lines of the file, superseded ones too."""

    def lines():
        text = (tmp_path / "metrics.jsonl").read_text()
        return [json.loads(line) for line in text.splitlines()]

    return lines
