"""A replayed microbatch equals an eager one in every bit, whatever documents it holds."""

import os
import subprocess
import sys

import pytest
import torch

from tests.titan.conftest import ROOT
from tests.titan.trainers import DOCUMENTS, ROWS, TOKENS, batch, running_trainer
from titan_lowprec.titan.graph import OverCapacity

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

LAYOUTS = [
    [[TOKENS], [TOKENS]],
    [[TOKENS // DOCUMENTS] * DOCUMENTS] * 2,
    [[1] * DOCUMENTS, [TOKENS]],
    [[300, 212], [17, 33, 64, 100, 2]],
    [[1], [31, 32, 33]],
    [[511, 1], [1, 511]],
    [[64] * 8, [63] * 8],
    [[129, 127, 128, 100], [5] * 31],
    [[32] * 16, [400]],
]
OVERFULL = [[9] * 9, [TOKENS]]


def warm_up(trainer, *, calls=2):
    """The eager optimizer steps that precede a capture."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(calls):
        trainer.optimizers.zero_grad()
        run(trainer, [[100, 200], [7, 400]], generator)
        trainer.optimizers.step()
    assert trainer.microbatch.keeps_gradients


def run(trainer, layouts, generator, **options):
    inputs, labels = batch(layouts, generator=generator)
    denominator = torch.full((), float((labels != -100).sum()), device=trainer.device)
    return trainer.microbatch(inputs, labels, denominator, **options)


def gradients(trainer):
    return [p.grad.to_local().clone() for p in trainer.model_parts[0].parameters()]


def measured(trainer, layouts, seed, **options):
    """Loss and gradients of one microbatch from gradients of zero."""
    trainer.optimizers.zero_grad(set_to_none=False)
    loss = run(trainer, layouts, torch.Generator().manual_seed(seed), **options)
    return loss, gradients(trainer)


def assert_same_bits(replayed, eager):
    assert torch.isfinite(eager[0])
    assert torch.equal(replayed[0], eager[0])
    for name, (got, wanted) in enumerate(zip(replayed[1], eager[1], strict=True)):
        assert torch.equal(got, wanted), name
        assert bool(wanted.any())


VARIANTS = {
    "fsdp2": ("--parallelism.one_process=fsdp2",),
    "mxfp8": ("--attention.recipe=mxfp8",),
    "bf16-chunked": (
        "--attention.recipe=bf16",
        "--loss.impl=linear_chunked",
        "--loss.chunk_rows=256",
    ),
    "compiled": ("--compile.enable", "--compile.components=model"),
    "checkpointed": (
        "--activation_checkpoint.mode=full",
        "--activation_checkpoint.no-preserve_rng_state",
    ),
    "selective-compiled": (
        "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.selective_ac_option=op",
        "--activation_checkpoint.no-preserve_rng_state",
        "--compile.enable",
        "--compile.components=model",
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_replay_equals_eager_in_every_bit_for_every_layout(tmp_path, variant):
    with running_trainer(tmp_path / "run", "--graph.enable", *VARIANTS[variant]) as trainer:
        warm_up(trainer)
        for seed, layouts in enumerate(LAYOUTS):
            replayed = measured(trainer, layouts, seed)
            eager = measured(trainer, layouts, seed, eager=True)
            assert_same_bits(replayed, eager)
        assert trainer.microbatch.replays == len(LAYOUTS)
        assert trainer.microbatch.over_capacity == 0


def test_replays_accumulate_as_eager_calls_do_after_an_optimizer_step(tmp_path):
    def accumulated(trainer, **options):
        trainer.optimizers.zero_grad(set_to_none=False)
        for seed, layouts in enumerate(LAYOUTS[:3]):
            run(trainer, layouts, torch.Generator().manual_seed(seed), **options)
        return gradients(trainer)

    with running_trainer(
        tmp_path / "run", "--graph.enable", f"--training.global_batch_size={3 * ROWS}"
    ) as trainer:
        warm_up(trainer, calls=6)
        accumulated(trainer)
        trainer.optimizers.step()
        replayed = accumulated(trainer)
        for got, wanted in zip(replayed, accumulated(trainer, eager=True), strict=True):
            assert torch.equal(got, wanted)


def test_over_capacity_runs_eagerly_is_counted_and_equals_a_graph_with_room(tmp_path):
    with running_trainer(tmp_path / "room", "--graph.enable") as trainer:
        warm_up(trainer)
        wanted = measured(trainer, OVERFULL, 3)
        assert trainer.microbatch.replays == 1
    with running_trainer(tmp_path / "run", "--graph.enable", "--graph.max_documents=8") as trainer:
        warm_up(trainer)
        fits = measured(trainer, LAYOUTS[6], 4)
        assert trainer.microbatch.over_capacity == 0
        assert_same_bits(measured(trainer, OVERFULL, 3), wanted)
        assert (trainer.microbatch.replays, trainer.microbatch.over_capacity) == (1, 1)
        assert_same_bits(measured(trainer, LAYOUTS[6], 4), fits)


def test_over_capacity_and_changed_batches_can_end_the_run(tmp_path):
    options = ("--graph.enable", "--graph.max_documents=8", "--graph.over_capacity=error")
    with running_trainer(tmp_path / "run", *options) as trainer:
        warm_up(trainer)
        measured(trainer, LAYOUTS[0], 0)
        with pytest.raises(OverCapacity, match=r"at most graph.max_documents=8 .* got 9"):
            measured(trainer, OVERFULL, 0)
        with pytest.raises(ValueError, match="as the captured one"):
            measured(trainer, [[TOKENS]], 0)
        trainer.optimizers.zero_grad(set_to_none=True)
        with pytest.raises(RuntimeError, match="set_to_none=False"):
            run(trainer, LAYOUTS[0], torch.Generator().manual_seed(0))


@pytest.mark.parametrize("microbatches", [1, 2])
@pytest.mark.parametrize("one_process", ["direct", "fsdp2"])
def test_a_run_with_graph_and_validation_equals_the_run_without(
    tmp_path, microbatches, one_process
):
    """Steps that are measured, 3 and 6, run eagerly between replays."""
    common = (
        "--training.steps=8",
        f"--training.global_batch_size={ROWS * microbatches}",
        "--validation.enable",
        "--validation.freq=2",
        "--validation.steps=2",
        "--metrics.health_every=3",
        f"--parallelism.one_process={one_process}",
    )

    def records(name, *options):
        with running_trainer(tmp_path / name, *common, *options) as trainer:
            trainer.train()
        from titan_lowprec.titan.metrics_file import read_metrics

        return read_metrics(tmp_path / name / "metrics.jsonl")

    eager, graph = records("eager"), records("graph", "--graph.enable")
    assert [r["step"] for r in graph if r["kind"] == "train"] == list(range(1, 9))
    for left, right in zip(eager, graph, strict=True):
        assert left["loss"] == right["loss"]
        assert left.get("grad_norm") == right.get("grad_norm")
    # two steps to warm up and two with hooks are eager
    assert graph[-2]["graph_replays"] == 4 * microbatches


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("layout", ["shard", "replicate"])
@pytest.mark.parametrize("compiled", ["compile", "eager"])
def test_two_processes_replay_what_they_compute_eagerly(tmp_path, layout, compiled):
    options = [f"--parallelism.data_parallel_{layout}_degree=2"]
    if layout == "replicate":
        options.append("--parallelism.data_parallel_shard_degree=1")
    if compiled == "compile":
        options += ["--compile.enable", "--compile.components=model"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2"]
    command += ["--rdzv_backend=c10d", "--rdzv_endpoint=localhost:0", "-m"]
    result = subprocess.run(
        [*command, "tests.titan.graph_processes", str(tmp_path / "run"), *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        text=True,
        timeout=200,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    assert result.returncode == 0, result.stdout
    assert result.stdout.count("REPLAY EQUALS EAGER") == 2
