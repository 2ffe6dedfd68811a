"""Whole-matrix causal attention in float64 with a recipe's casts: an oracle without tiles."""

import itertools
from dataclasses import dataclass

import torch

from titan_lowprec.formats.catalogue import E4M3FN, NVFP4
from titan_lowprec.formats.token_blocks import BLOCK_TOKENS
from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.ops.quantize.api import dequantize_nvfp4, quantize_nvfp4
from titan_lowprec.shapes import Float, Float64, Tensor
from titan_lowprec.testing.cases import PackedInputs

WEIGHT_SCALE = 2.0**8
"""Factor of a softmax weight before its E4M3 cast."""


@dataclass(frozen=True, slots=True)
class EagerAttention:
    """Results in the inputs' dtype, the LSE in float64."""

    out_NHD: Float[Tensor, "N H D"]
    lse_NH: Float64[Tensor, "N H"]
    dq_NHD: Float[Tensor, "N H D"]
    dk_NJD: Float[Tensor, "N J D"]
    dv_NJD: Float[Tensor, "N J D"]

    def named(self) -> dict[str, Tensor]:
        """The tensors by the names that tests compare under."""
        return {"out": self.out_NHD, "dq": self.dq_NHD, "dk": self.dk_NJD, "dv": self.dv_NJD}


def eager_attention(inputs: PackedInputs, spec: AttentionSpec) -> EagerAttention:
    """Compute the documents of one packed row that has no tail, for bf16, mxfp8, nvfp4_mixed.

    Casts: operands by ``torch.float8_e4m3fn`` with a power of two for 32 tokens (strict: one),
    softmax weights by a fixed factor, P and dS with a power of two for a line of the whole matrix.
    """
    (line,) = inputs.cu_seqlens_RM.tolist()
    documents = [
        _document([x[start:end] for x in inputs.tensors()], spec)
        for start, end in itertools.pairwise(line)
        if end > start
    ]
    return EagerAttention(
        **{
            name: torch.cat([getattr(x, name) for x in documents])
            for name in EagerAttention.__dataclass_fields__
        }
    )


def _document(parts: list[Tensor], spec: AttentionSpec) -> EagerAttention:
    dtype, D = parts[0].dtype, parts[0].shape[-1]
    repeats = parts[0].shape[1] // parts[1].shape[1]
    q, k, v, g = (x.double().transpose(0, 1) for x in parts)
    turn = _hadamard_matrix(D) if spec.rotate else torch.eye(D, dtype=torch.float64)
    q, k = q @ turn, k @ turn
    score_q, score_k = (_score_operand(x, spec) for x in (q, k))
    q, k, v, g = (_operand(x, spec) for x in (q, k, v, g))
    k, v, score_k = (x.repeat_interleave(repeats, 0) for x in (k, v, score_k))
    score = D**-0.5 * score_q @ score_k.transpose(1, 2)
    score = score.masked_fill(torch.ones_like(score[0], dtype=torch.bool).triu(1), -torch.inf)
    weight = torch.exp(score - score.amax(-1, keepdim=True))
    out = (_weight(weight, spec) @ v / weight.sum(-1, keepdim=True)).to(dtype)
    P = score.softmax(-1)
    U = P * (g @ v.transpose(1, 2) - (g * out.double()).sum(-1, keepdim=True))
    dv = _line(P, spec, -2).transpose(1, 2) @ g
    dk = D**-0.5 * _line(U, spec, -2).transpose(1, 2) @ q @ turn.T
    dq = D**-0.5 * _line(U, spec, -1) @ k @ turn.T
    dk, dv = (x.unflatten(0, (-1, repeats)).sum(1) for x in (dk, dv))
    return EagerAttention(
        out.transpose(0, 1),
        score.logsumexp(-1).T,
        *(x.to(dtype).transpose(0, 1) for x in (dq, dk, dv)),
    )


def _hadamard_matrix(size: int) -> Float64[Tensor, "D D"]:
    """Sylvester's construction, orthonormal."""
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix * size**-0.5


def _bf16(x: Tensor) -> Tensor:
    return x.to(torch.bfloat16).double()


def _e4m3(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Cast with one power of two for the elements along ``dims``, rounded up."""
    largest = x.abs().amax(dims, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    scale = torch.exp2(torch.ceil(torch.log2(largest / E4M3FN.max_value)))
    return (x / scale).float().to(torch.float8_e4m3fn).double() * scale


def _operand(x_HTD: Tensor, spec: AttentionSpec) -> Tensor:
    if spec.recipe == "bf16":
        return _bf16(x_HTD)
    T = x_HTD.shape[1]
    block = 1 if spec.scales == "token" else BLOCK_TOKENS
    padded = torch.nn.functional.pad(x_HTD, (0, 0, 0, -T % block))
    return _e4m3(padded.unflatten(1, (-1, block)), (-2, -1)).flatten(1, 2)[:, :T]


def _score_operand(x_HTD: Tensor, spec: AttentionSpec) -> Tensor:
    if spec.recipe != "nvfp4_mixed":
        return _operand(x_HTD, spec)
    four = quantize_nvfp4(x_HTD.float().contiguous(), group=NVFP4.group, outer="none")
    return dequantize_nvfp4(four).double()


def _weight(x_HTS: Tensor, spec: AttentionSpec) -> Tensor:
    if spec.recipe == "bf16":
        return _bf16(x_HTS)
    return (x_HTS * WEIGHT_SCALE).float().to(torch.float8_e4m3fn).double() / WEIGHT_SCALE


def _line(x_HTS: Tensor, spec: AttentionSpec, dim: int) -> Tensor:
    return _bf16(x_HTS) if spec.recipe == "bf16" else _e4m3(x_HTS, (dim,))
