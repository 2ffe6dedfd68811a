"""What a fused kernel in bf16 computes, written out in fp32 for any device."""

from typing import Any

import torch

from titan_lowprec.shapes import Bool, Float, Float32, Tensor


def round_bf16(x: Float32[Tensor, "*N"]) -> Float32[Tensor, "*N"]:
    """Round to bf16 and back; bf16 products are then exact in fp32, and fast on a CPU."""
    return x.bfloat16().float()


class Bf16Attention(torch.autograd.Function):
    """Attention of bf16 operands with fp32 sums; backward from output and row statistics.

    Numerics:
        Scores and their exponentials are fp32. Weights are rounded to bf16 for their product with
        V, relative to the row's maximum and before the division by their fp32 sum; the output is
        rounded to bf16. Backward: P is rounded to bf16 for dV, and dS for dQ and dK; D is the row
        sum of dO * O, of the rounded output. A kernel that reads keys in several tiles rounds
        weights relative to the maximum so far.

    Source:
        FlexAttention's kernels (torch 2.13); arXiv:2205.14135, algorithms 1 and 4.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Float[Tensor, "B J R T D"],
        k: Float[Tensor, "B J K D"],
        v: Float[Tensor, "B J K D"],
        mask: Bool[Tensor, "B T K"],
    ) -> Float[Tensor, "B J R T D"]:
        score = _scores(q, k, mask)
        shift = score.amax(-1, keepdim=True).clamp_min(torch.finfo(torch.float32).min)
        weight = torch.exp(score - shift)
        total = weight.sum(-1, keepdim=True)
        total = total.masked_fill(total == 0, 1.0)
        out = torch.einsum("bjrtk,bjkd->bjrtd", round_bf16(weight), v.float()) / total
        out = out.bfloat16()
        ctx.save_for_backward(q, k, v, mask, out, shift + torch.log(total))
        return out

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, mask, out, lse = ctx.saved_tensors
        grad = grad_outputs[0].bfloat16().float()
        weight = torch.exp(_scores(q, k, mask) - lse)
        dv = torch.einsum("bjrtk,bjrtd->bjkd", round_bf16(weight), grad)
        delta = (grad * out.float()).sum(-1, keepdim=True)
        dweight = torch.einsum("bjrtd,bjkd->bjrtk", grad, v.float())
        dscore = round_bf16(weight * (dweight - delta))
        scale = q.shape[-1] ** -0.5
        dq = torch.einsum("bjrtk,bjkd->bjrtd", dscore, k.float()) * scale
        dk = torch.einsum("bjrtk,bjrtd->bjkd", dscore, q.float()) * scale
        return dq.bfloat16(), dk.bfloat16(), dv.bfloat16(), None


def _scores(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    score = torch.einsum("bjrtd,bjkd->bjrtk", q.float(), k.float()) * q.shape[-1] ** -0.5
    return score.masked_fill(~mask[:, None, None], -torch.inf)
