"""Measures of error against a float64 truth, and the attention truth itself."""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from titan_lowprec.ops.attention.spec import Mask
from titan_lowprec.shapes import Float, Float64, Int32, Tensor

ACCURACY_FACTOR = 1.25
"""How much larger a kernel's error may be than that of the eager reference in its dtype."""


def cosine(actual: Float[Tensor, "*N"], truth: Float[Tensor, "*N"]) -> float:
    """Cosine of the angle between two tensors, in float64."""
    a, b = actual.double().flatten(), truth.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


def relative_l2(actual: Float[Tensor, "*N"], truth: Float[Tensor, "*N"]) -> float:
    """Norm of the error over the norm of the truth, in float64; 0 for two zero tensors."""
    error = (actual.double() - truth.double()).norm()
    return float(error / truth.double().norm()) if error != 0 else 0.0


def row_gain_error(
    actual: Float[Tensor, "*N D"], truth: Float[Tensor, "*N D"]
) -> Float64[Tensor, "*N"]:
    """``<o, o_ref> / <o_ref, o_ref> - 1`` of each row: the coherent part of its error."""
    a, b = actual.double(), truth.double()
    return (a * b).sum(-1) / b.square().sum(-1) - 1


def assert_as_accurate(
    name: str,
    actual: Mapping[str, Tensor],
    eager: Mapping[str, Tensor],
    truth: Mapping[str, Tensor],
    *,
    factor: float = ACCURACY_FACTOR,
) -> None:
    """Bound each tensor's relative L2 error by ``factor`` times that of the eager reference.

    Args:
        name: What is compared, for the message.
        actual: Results under test.
        eager: Results of the reference in the same dtype.
        truth: float64 results.
        factor: Allowed ratio; measured, never loosened.

    Raises:
        AssertionError: An error is larger, a tensor is missing, or its dtype differs from the
            reference's.
    """
    assert actual.keys() == eager.keys() == truth.keys(), f"{name}: {actual.keys()}, {eager.keys()}"
    for key, exact in truth.items():
        assert actual[key].dtype == eager[key].dtype, f"{name}: {key} is {actual[key].dtype}"
        error, allowed = relative_l2(actual[key], exact), relative_l2(eager[key], exact)
        # Where the reference is exact, one unit in the last place of its dtype is allowed.
        allowed = max(allowed, torch.finfo(eager[key].dtype).eps / 4)
        assert error <= factor * allowed, (
            f"{name}: relative L2 error of {key} must be at most {factor} times the reference's "
            f"{allowed:.3e}, got {error:.3e}"
        )


@dataclass(frozen=True, slots=True)
class AttentionTruth:
    """Attention and its gradients in float64."""

    out_NHD: Float64[Tensor, "N H D"]
    lse_NH: Float64[Tensor, "N H"]
    dq_NHD: Float64[Tensor, "N H D"]
    dk_NJD: Float64[Tensor, "N J D"]
    dv_NJD: Float64[Tensor, "N J D"]

    def named(self) -> dict[str, Tensor]:
        """The tensors by the names that tests compare under."""
        return {
            "out": self.out_NHD,
            "dq": self.dq_NHD,
            "dk": self.dk_NJD,
            "dv": self.dv_NJD,
        }


def attention_truth(
    q_NHD: Float[Tensor, "N H D"],
    k_NJD: Float[Tensor, "N J D"],
    v_NJD: Float[Tensor, "N J D"],
    grad_out_NHD: Float[Tensor, "N H D"],
    cu_seqlens_RM: Int32[Tensor, "R M1"],
    *,
    mask: Mask,
) -> AttentionTruth:
    """Compute softmax attention per document in float64, with PyTorch's own autograd."""
    N, H, _ = q_NHD.shape
    row_tokens = N // cu_seqlens_RM.shape[0]
    leaves = [x.detach().double().requires_grad_() for x in (q_NHD, k_NJD, v_NJD)]
    out = torch.zeros_like(leaves[0])
    lse_NH = torch.full((N, H), torch.inf, dtype=torch.float64, device=q_NHD.device)
    for row, line in enumerate(cu_seqlens_RM.tolist()):
        for start, end in itertools.pairwise(line):
            part = torch.arange(start, end, device=q_NHD.device) + row * row_tokens
            q, k, v = (x[part].transpose(0, 1) for x in leaves)
            k, v = (x.repeat_interleave(H // x.shape[0], dim=0) for x in (k, v))
            score = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
            if mask == "causal":
                future = torch.ones(score.shape[-2:], dtype=torch.bool, device=score.device)
                score = score.masked_fill(future.triu(1), -torch.inf)
            lse_NH[part] = torch.logsumexp(score, -1).T.detach()
            out = out.index_put((part,), (score.softmax(-1) @ v).transpose(0, 1))
    gradients = torch.autograd.grad(out, leaves, grad_out_NHD.double())
    return AttentionTruth(out.detach(), lse_NH, *gradients)
