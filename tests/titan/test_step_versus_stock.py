"""The benchmark beside stock TorchTitan: its jobs, its turns and its ratios."""

import json
import sys
from multiprocessing import Pipe
from threading import Thread
from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer
from torchtitan.config import ConfigManager

from tests.titan.benches import load_bench
from titan_lowprec.data.bundled import resolve_path
from titan_lowprec.titan.check_config import find_problems


@pytest.fixture(scope="module")
def bench():
    return load_bench("step_versus_stock")


@pytest.mark.slow
def test_every_contender_is_a_job_without_problems(bench, tmp_path):
    texts = {rows: bench.write_text(tmp_path / f"{rows}.jsonl", "2k") for rows in bench.ROWS}
    for contender in bench.CONTENDERS.values():
        text = texts[contender.rows]
        config = ConfigManager().parse_args(contender.arguments(text, str(tmp_path)))
        assert config.compile.enable
        modes = {"linears": "selective", "budget70": "memory_budget"}
        mode = modes.get(contender.checkpointing, contender.checkpointing)
        assert config.activation_checkpoint.mode == mode
        if contender.recipe is not None:
            assert [*find_problems(config, device_type="cuda", world_size=1)] == []


@pytest.mark.slow
def test_text_for_long_rows_is_cut_to_documents_of_a_row(monkeypatch, tmp_path):
    contenders = sys.modules["contenders"]
    monkeypatch.setitem(contenders.ROWS, "64k", (1, 4096))
    documents = contenders.load_stock_text(str(contenders.write_text(tmp_path / "b.jsonl", "64k")))
    tokenizer = Tokenizer.from_file(f"{resolve_path('bundled:tokenizer')}/tokenizer.json")
    lengths = [len(tokenizer.encode(d["text"], add_special_tokens=False).ids) for d in documents]
    assert len(lengths) > 50
    assert all(4090 < length + 2 <= 4096 for length in lengths)  # BOS and EOS


def test_a_contender_trains_only_in_its_turn(bench, monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    ours, theirs = Pipe()
    trained = []
    trainer = SimpleNamespace(step=0, train_step=lambda iterator: trained.append(trainer.step))
    plan = bench.PLANS["2k"]
    bench.Turns(trainer, theirs, plan)

    def run():
        for trainer.step in range(1, plan.steps + 1):
            trainer.train_step(None)

    thread = Thread(target=run)
    thread.start()
    for number in range(plan.rounds):
        assert ours.recv() == "ready"
        assert len(trained) == plan.warm + number * plan.block
        ours.send("go")
        assert ours.recv() > 0
    thread.join()
    assert not ours.poll()


def test_ratios_compare_blocks_of_one_round(bench):
    results = {"2k-mxfp8": {"blocks_s": [0.2, 0.4, 0.2, 0.2], "memory_reserved_gib": 30.0}}
    line = json.loads(bench.record("2k-mxfp8", results, [0.25, 0.5, 0.3, 0.2], {"run": "x"}))
    assert line["speed_over_stock"] == 1.25
    assert line["speed_over_stock_range"] == [1.0, 1.5]
    assert line["tokens_per_s"] == 81_920


def test_a_contender_that_died_is_reported(bench):
    line = json.loads(
        bench.record("2k-bf16", {"2k-bf16": {"error": "ended with status 1"}}, [], {})
    )
    assert line["error"] == "ended with status 1"
    assert "step_ms" not in line
