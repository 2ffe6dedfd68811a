"""The leak probe finds what it should, and the statistics count what they say."""

import dataclasses

import pytest
import torch

from titan_lowprec.diagnostics.attention_stats import gradient_statistics
from titan_lowprec.diagnostics.causal_leak import LARGE_CHANGE, leaking_rows, probe_prefix
from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.testing.cases import PackedCase, packed_inputs

CASE = PackedCase(rows=((40, 70),), heads=2, kv_heads=1, head_dim=32)
MXFP8 = AttentionSpec.mxfp8(mask="causal")


def probe(spec, size=LARGE_CHANGE):
    inputs = packed_inputs(CASE, kind="gaussian", strength=1.0, seed=0, device="cpu")
    return probe_prefix(
        *inputs.tensors(),
        inputs.cu_seqlens_RM,
        change_at=40 + 37,
        size=size,
        seed=1,
        spec=spec,
        impl="reference",
    )


def test_the_probe_reports_a_leak_inside_the_block_of_the_change():
    report = probe(MXFP8)
    assert not report.clean and not report.noise
    assert report.rows["O"] and all(40 + 32 <= row < 40 + 37 for row in report.rows["O"])
    assert report.largest_relative["O"] > 0


def test_the_probe_is_clean_under_strict_scales():
    report = probe(dataclasses.replace(MXFP8, scales="token"))
    assert report.clean and report.rows == {"O": [], "LSE": [], "dQ": []}
    assert report.largest_relative == {"O": 0.0, "LSE": 0.0, "dQ": 0.0}


def test_the_probe_sees_a_full_mask_as_a_leak_everywhere_in_the_document():
    report = probe(AttentionSpec.bf16(mask="full"))
    assert report.rows["O"] == list(range(40, 77))


def test_leaking_rows_compare_bits_and_let_equal_nans_pass():
    before = (torch.tensor([1.0, torch.nan, 2.0, 3.0]),) * 3
    after = (torch.tensor([1.0, torch.nan, 2.0 + 2**-22, 9.0]),) * 3
    assert leaking_rows(before, after, end=3) == {"O": [2], "LSE": [2], "dQ": [2]}


def test_statistics_count_gradients_and_weights_cast_to_zero():
    """Two keys: the weight of the second is 2**-30 of the first's and shares its 32 x 32 tile."""
    q, k, v, g = (torch.zeros(2, 1, 32) for _ in range(4))
    q[..., 0], k[0, :, 0] = 1.0, 30.0 * torch.log(torch.tensor(2.0)) * 32**0.5
    v[0], v[1], g[:] = 1.0, -1.0, 1.0
    cu = torch.tensor([[0, 2]], dtype=torch.int32)
    tile = dataclasses.replace(
        MXFP8, fold="block_scaled", gradient_groups="tile", rotate=False, scales="token"
    )
    statistics = gradient_statistics(q, k, v, g, cu, spec=tile)
    # Visible weights: 1, 1 and 2**-30; under a maximum of 1 the last is cast to zero.
    assert statistics.weight_flushed_dv == pytest.approx(1 / 3)
    line = dataclasses.replace(MXFP8, rotate=False, scales="token")
    assert gradient_statistics(q, k, v, g, cu, spec=line).weight_flushed_dv == 0.0
    bf16 = gradient_statistics(q, k, v, g, cu, spec=AttentionSpec.bf16(mask="causal"))
    assert (bf16.ds_flushed_dq, bf16.ds_flushed_dk, bf16.weight_flushed_dv) == (0.0, 0.0, 0.0)


def test_statistics_need_a_document():
    x = torch.zeros(4, 1, 32)
    with pytest.raises(ValueError, match="a document with a token"):
        gradient_statistics(x, x, x, x, torch.zeros(1, 2, dtype=torch.int32), spec=MXFP8)
