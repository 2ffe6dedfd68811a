"""Compiled FlexAttention on a GPU: forward and gradients against float64, at a ragged size."""

import pytest
import torch

from titan_lowprec.models.dflash.attention import build_mask, draft_attention
from titan_lowprec.testing.accuracy import relative_l2

pytestmark = pytest.mark.gpu

BOUNDS = {
    # of the output and of dq, dk, dv, over the rounding of a bf16 output (2**-9 / sqrt(3))
    "flex_bf16": (4.0, 8.0),
    "flex_fp32_ieee": (1.05, 1.05),
    "flex_fp32_tf32": (1.6, 3.0),
}


@pytest.mark.parametrize("impl", sorted(BOUNDS))
def test_compiled_flex_agrees_with_float64(impl, make_args, make_batch):
    args = make_args(block_tokens=5, anchor_slots=60)
    batch = make_batch(args, (90, 1, 200), (300,), (7, 3), tokens=300, learned=0.8)
    mask = batch.mask
    cuda = [mask.anchors.to("cuda"), mask.document_BS.cuda(), mask.block_tokens]
    mask = type(mask)(*cuda)
    q = torch.randn(3, 4, mask.queries, 64)
    k, v = (torch.randn(3, 2, mask.keys, 64) for _ in range(2))
    grad = torch.randn_like(q).bfloat16().cuda()
    operands = [x.bfloat16().cuda() for x in (q, k, v)]

    def run(impl, dtype):
        leaves = [x.to(dtype).requires_grad_() for x in operands]
        out = draft_attention(*leaves, mask=build_mask(mask, impl=impl), impl=impl)
        out.backward(grad.to(dtype))
        return [out.detach(), *(x.grad for x in leaves)]

    exact = run("reference", torch.float64)
    ours = run(impl, torch.bfloat16)
    unused = ~mask.anchors.keep_BA.repeat_interleave(5, dim=1)
    assert bool(unused.any())
    assert float(ours[0].transpose(1, 2)[unused].abs().max()) == 0
    assert all(bool(x.isfinite().all()) for x in ours)
    for name, x, truth, bound in zip(
        ("out", "dq", "dk", "dv"),
        ours,
        exact,
        (BOUNDS[impl][0], *[BOUNDS[impl][1]] * 3),
        strict=True,
    ):
        error = relative_l2(x, truth) / relative_l2(truth.bfloat16(), truth)
        print(f"{impl} {name}: {error:.3f} roundings of a bf16 result")
        assert error < bound, (name, error)
