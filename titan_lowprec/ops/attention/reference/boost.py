"""Powers of two that keep the fp16 partial sums of dQ in range."""

import torch

from titan_lowprec.ops.attention.reference.operands import Operand
from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.shapes import Float32, Int32, Tensor

_TARGET = 2.0**15
_LARGEST_EXPONENT = 126


def _norms(operand: Operand) -> Float32[Tensor, "N H"]:
    return operand.values_NHD.square().sum(-1).sqrt() * operand.factor_NH


def boost_exponents(
    g: Operand,
    v: Operand,
    k: Operand,
    documents: tuple[tuple[int, int], ...],
    spec: AttentionSpec,
) -> Int32[Tensor, "N H"]:
    """Choose the power of two of each query row.

    Args:
        g: Incoming gradient as the products use it.
        v: Values as the products use them.
        k: Keys as the products use them.
        documents: First token and length of each document.
        spec: ``scales="token"`` with a causal mask takes the row's own norm of G and the maxima
            over keys up to the row; otherwise all maxima are over the document.

    Numerics:
        ``|sum_j U_ij K_j| <= 2 |G_i| max|V| max|K|``, since ``|U| <= P (|E| + |D|)`` and P sums
        to one; the target 2**15 leaves a factor of two to the largest fp16. A bound of zero or
        one that is not finite gives 0.

    Source:
        arXiv:2611.03344, section 3.3 and appendix A.4.
    """
    strict = spec.scales == "token" and spec.mask == "causal"
    g_NH, v_NJ, k_NJ = _norms(g), _norms(v), _norms(k)
    repeats = g_NH.shape[1] // v_NJ.shape[1]
    bound_NH = torch.zeros_like(g_NH)
    for start, length in documents:
        part = slice(start, start + length)
        if strict:
            row_g, row_v, row_k = g_NH[part], v_NJ[part].cummax(0)[0], k_NJ[part].cummax(0)[0]
        else:
            row_g, row_v, row_k = (x[part].amax(0, keepdim=True) for x in (g_NH, v_NJ, k_NJ))
        bound_NH[part] = 2 * row_g * (row_v * row_k).repeat_interleave(repeats, dim=1)
    ratio_NH = _TARGET / bound_NH
    _, exponent_NH = torch.frexp(torch.where(torch.isfinite(ratio_NH), ratio_NH, 1.0))
    boost_NH = (exponent_NH - 1).clamp(-_LARGEST_EXPONENT, _LARGEST_EXPONENT).to(torch.int32)
    return torch.where(torch.isfinite(ratio_NH), boost_NH, 0)
