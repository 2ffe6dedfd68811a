"""Health figures against counts by hand, and on operands that went wrong."""

import dataclasses

import pytest
import torch

from titan_lowprec.diagnostics.attention_health import attention_health
from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.testing.cases import PackedCase, packed_inputs

CASE = PackedCase(rows=((40, 70),), heads=2, kv_heads=1, head_dim=32)
MXFP8 = dataclasses.replace(AttentionSpec.mxfp8(mask="causal"), rotate=False)
ROW = torch.tensor([0, 40, 110], dtype=torch.int32)


def health(spec=MXFP8, change=lambda q, k, v: None):
    inputs = packed_inputs(CASE, kind="gaussian", strength=1.0, seed=0, device="cpu")
    q, k, v = (x.clone() for x in inputs.tensors()[:3])
    change(q, k, v)
    return attention_health(q, k, v, ROW, spec=spec, impl="reference")


def test_codes_of_one_block_are_counted_as_by_hand():
    """A block of 64 x 0.5 holds its maximum 448, one element that flushes and a zero."""

    def change(q, k, v):
        k.fill_(0.5)
        k[0, 0, 0], k[0, 0, 1], k[0, 0, 2] = 448.0, 2.0**-11, 0.0
        k[40:] *= 2.0**12

    codes = health(change=change).codes["k"]
    count = 110 * 32
    assert codes.at_maximum == 1 / count
    assert codes.flushed == 1 / count
    # tokens 0-31 with scale 1; 32-39 and the second document hold 0.5 and 2048 at code 256
    assert codes.exponent_median == 3.0
    assert codes.exponent_range == 12.0


@pytest.mark.parametrize(
    ("recipe", "low", "high"), [("bf16", 1e-3, 4e-3), ("mxfp8", 1e-2, 6e-2), ("fp32", 1e-3, 2e-3)]
)
def test_output_error_is_that_of_the_recipe(recipe, low, high):
    """bf16 operands: the exact recipe still rounds its output to bf16."""
    figures = health(getattr(AttentionSpec, recipe)(mask="causal"))
    assert low <= figures.output_error <= high
    assert bool(figures.codes) == (recipe == "mxfp8")


def test_row_sums_of_ds_tell_the_fault_of_d():
    """Measured: 0.017 and 0.074; centred 2e-7."""

    def add_mean(q, k, v):
        v += 2.0

    fault = dataclasses.replace(MXFP8, delta_gradient="unquantised_fault")
    centred = dataclasses.replace(MXFP8, centring=True)
    sums = [health(spec, add_mean).ds_row_sum for spec in (centred, MXFP8, fault)]
    assert sums[0] < 1e-6 and 1e-3 < sums[1] < sums[2] / 4
    assert health(AttentionSpec.bf16(mask="causal")).ds_row_sum is None


def test_a_block_scale_leaks_inside_the_block_and_nowhere_else():
    leak = health().leak
    assert leak.leaking_rows > 0 and leak.rows_outside_block == 0 and not leak.noise
    assert 0 <= leak.natural_change < leak.relative_change
    strict = health(dataclasses.replace(MXFP8, scales="token")).leak
    changes = (strict.relative_change, strict.natural_change)
    assert strict.leaking_rows == 0 and changes == (0.0, 0.0)


def test_a_full_mask_reaches_rows_outside_the_block():
    full = health(AttentionSpec.bf16(mask="full")).leak
    assert full.rows_outside_block >= 32


def test_operands_that_are_not_finite_give_nan_and_no_error():
    def change(q, k, v):
        k[5] = torch.nan

    figures = health(change=change)
    assert figures.output_error != figures.output_error


def test_the_training_generator_is_not_touched():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    health()
    assert torch.equal(before, torch.get_rng_state())
