"""Probe for causal leaks: change a suffix by large values and compare earlier output bits."""

from dataclasses import dataclass

import torch

from titan_lowprec.ops.attention.api import Impl, attention_packed
from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.shapes import Float, Int32, Tensor

LARGE_CHANGE = 1e6
"""Size of the changed values: a change of 2 is missed in most draws, since power-of-two scales
keep bits, and NaN spreads even in a correct kernel."""


@dataclass(frozen=True, slots=True)
class LeakReport:
    """Rows before the change whose bits moved, and by how much."""

    change_at: int
    rows: dict[str, list[int]]
    """Leaking token rows of O, LSE and dQ."""
    largest_relative: dict[str, float]
    """Largest change of a row, relative to the row's norm."""
    noise: bool
    """Whether two runs of the unchanged input differ: then a leak proves nothing."""

    @property
    def clean(self) -> bool:
        """Whether no earlier bit moved and the probe could have told."""
        return not self.noise and not any(self.rows.values())


def attention_results(
    q_NHD: Float[Tensor, "N H D"],
    k_NJD: Float[Tensor, "N J D"],
    v_NJD: Float[Tensor, "N J D"],
    grad_out_NHD: Float[Tensor, "N H D"],
    cu_seqlens_RM: Int32[Tensor, "R M1"],
    *,
    spec: AttentionSpec,
    impl: Impl = "reference",
) -> tuple[Tensor, ...]:
    """Compute O, LSE, dQ, dK and dV at a fixed incoming gradient."""
    q, k, v = (x.detach().clone().requires_grad_() for x in (q_NHD, k_NJD, v_NJD))
    result = attention_packed(q, k, v, cu_seqlens_RM, spec=spec, impl=impl)
    gradients = torch.autograd.grad(result.out_NHD, (q, k, v), grad_out_NHD)
    return result.out_NHD.detach(), result.lse_NH, *gradients


def leaking_rows(
    before: tuple[Tensor, ...], after: tuple[Tensor, ...], *, end: int
) -> dict[str, list[int]]:
    """Token rows before ``end`` in which O, LSE or dQ differ in a bit."""
    rows = {}
    for name, a, b in zip(("O", "LSE", "dQ"), before, after, strict=False):
        moved = (a[:end] != b[:end]) & ~(a[:end].isnan() & b[:end].isnan())
        rows[name] = moved.reshape(end, -1).any(1).nonzero().flatten().tolist()
    return rows


def probe_prefix(
    q_NHD: Float[Tensor, "N H D"],
    k_NJD: Float[Tensor, "N J D"],
    v_NJD: Float[Tensor, "N J D"],
    grad_out_NHD: Float[Tensor, "N H D"],
    cu_seqlens_RM: Int32[Tensor, "R M1"],
    *,
    change_at: int,
    size: float,
    seed: int,
    spec: AttentionSpec,
    impl: Impl,
) -> LeakReport:
    """Redraw every token from ``change_at`` on at a given size and compare earlier rows.

    Args:
        q_NHD: Queries.
        k_NJD: Keys.
        v_NJD: Values.
        grad_out_NHD: Gradient of the output; its rows before the change stay fixed.
        cu_seqlens_RM: Document offsets of one row.
        change_at: First changed token.
        size: Standard deviation of the new values; ``LARGE_CHANGE`` is a good choice.
        seed: Of the new values.
        spec: What to compute.
        impl: With what.
    """
    inputs = (q_NHD, k_NJD, v_NJD, grad_out_NHD)
    before = attention_results(*inputs, cu_seqlens_RM, spec=spec, impl=impl)
    again = attention_results(*inputs, cu_seqlens_RM, spec=spec, impl=impl)
    generator = torch.Generator().manual_seed(seed)

    def with_new_suffix(x: Tensor) -> Tensor:
        fresh = torch.randn(x[change_at:].shape, generator=generator) * size
        return torch.cat((x[:change_at], fresh.to(x.dtype).to(x.device)))

    q, k, v, grad_out = (with_new_suffix(x) for x in inputs)
    after = attention_results(q, k, v, grad_out, cu_seqlens_RM, spec=spec, impl=impl)
    largest = {}
    for name, a, b in zip(("O", "LSE", "dQ"), before, after, strict=False):
        a, b = (x[:change_at].double().reshape(change_at, -1) for x in (a, b))
        change, norm = (a - b).norm(dim=1), a.norm(dim=1)
        largest[name] = float(torch.where(change > 0, change / norm, 0.0).max())
    return LeakReport(
        change_at=change_at,
        rows=leaking_rows(before, after, end=change_at),
        largest_relative=largest,
        noise=any(leaking_rows(before, again, end=len(q_NHD)).values()),
    )
