"""The same training under other settings: equal where the arithmetic is, close where it is not."""

import pytest
import torch

pytestmark = pytest.mark.slow

STEPS = ("--training.steps=2", "--checkpoint.no-enable", "--debug.deterministic")


@pytest.fixture(scope="module")
def plain(train):
    run = train("variant-plain", *STEPS)
    assert run.status == 0, run.output
    return run


def assert_close(run, plain, rtol):
    assert run.status == 0, run.output
    assert run.column("fingerprint") == plain.column("fingerprint")
    for name in ("loss", "grad_norm"):
        torch.testing.assert_close(
            torch.tensor(run.column(name)), torch.tensor(plain.column(name)), rtol=rtol, atol=0
        )


@pytest.mark.parametrize(
    "setting",
    [
        (
            "--activation_checkpoint.mode=selective",
            "--activation_checkpoint.selective_ac_option=op",
        ),
        ("--activation_checkpoint.mode=selective", "--activation_checkpoint.selective_ac_option=2"),
        ("--activation_checkpoint.mode=full",),
    ],
    ids=["op", "every-second", "full"],
)
def test_activation_checkpointing_does_not_change_a_bit(train, plain, setting):
    run = train(f"variant-ac-{setting[-1][-4:]}", *STEPS, *setting)
    assert_close(run, plain, rtol=0)


def test_health_measurements_do_not_change_a_bit_and_are_recorded(train, plain):
    run = train(
        "variant-health",
        *STEPS,
        "--metrics.health_every=2",
        "--activation_checkpoint.mode=selective",
        "--activation_checkpoint.selective_ac_option=op",
    )
    assert_close(run, plain, rtol=0)
    first, second = run.metrics()
    assert not any(key.startswith(("quantisation/", "causality/")) for key in first)
    assert 1e-3 < second["quantisation/output_error/layer3"] < 0.1
    assert second["causality/rows_outside_block/largest"] == 0


def test_chunked_head_trains_like_logits(train, plain):
    assert_close(train("variant-chunked", *STEPS, "--loss.impl=linear_chunked"), plain, rtol=1e-4)


VALIDATED = ("--validation.enable", "--validation.freq=2", "--validation.steps=1")


@pytest.fixture(scope="module")
def tensor_parallel(train):
    options = (*STEPS, *VALIDATED, "--parallelism.tensor_parallel_degree=2")
    return train("variant-tp", *options, processes=2)


def test_tensor_parallel_trains_like_one_process(tensor_parallel, plain):
    assert_close(tensor_parallel, plain, rtol=2e-2)


def test_tensor_parallel_chunked_head_trains_and_validates_like_logits(
    train, tensor_parallel, plain
):
    """By the literal command; the head's vocabulary is spread over the two processes."""
    run = train(
        "variant-tp-chunked",
        *STEPS,
        *VALIDATED,
        "--parallelism.tensor_parallel_degree=2",
        "--loss.impl=linear_chunked",
        processes=2,
        module="torchtitan.train",
    )
    assert_close(run, tensor_parallel, rtol=1e-4)
    assert_close(run, plain, rtol=2e-2)
    (ours,), (logits,) = (each.metrics("validation") for each in (run, tensor_parallel))
    assert ours["tokens"] == logits["tokens"]
    assert ours["loss"] == pytest.approx(logits["loss"], rel=1e-4)
