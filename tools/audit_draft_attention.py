"""Attention of drafts in several precisions against float64; part of `audit_reductions.py --draft`.

Where FlexAttention's kernels cannot run, their arithmetic is written out: key tiles one after the
other, a running maximum, and a rounding where the kernel has one.
"""

import dataclasses
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_lowprec.models.dflash.anchors import Anchors
from titan_lowprec.models.dflash.attention import build_mask, draft_attention
from titan_lowprec.models.dflash.masks import DraftMask
from titan_lowprec.testing.accuracy import relative_l2

TILE = 64
NAMES = ("out", "dq", "dk", "dv")


def keep(x: Tensor) -> Tensor:
    """No rounding."""
    return x


def to_bf16(x: Tensor) -> Tensor:
    """Round to bf16, stored as it was."""
    return x.bfloat16().to(x.dtype)


def to_tf32(x: Tensor) -> Tensor:
    """Round fp32 to the 10 stored bits of mantissa that TF32 products read, ties to even."""
    bits = x.float().view(torch.int32)
    odd = (bits >> 13) & 1
    return ((bits + 0xFFF + odd) & ~0x1FFF).view(torch.float32)


@dataclass(frozen=True)
class Arithmetic:
    """Where an implementation rounds; operands are bf16 values everywhere."""

    weight: Callable[[Tensor], Tensor]
    """P and dS before their products."""
    state: Callable[[Tensor], Tensor]
    """Scores, running maximum, sum and accumulator after every step."""


ARITHMETIC = {
    "bf16, as FlexAttention": Arithmetic(to_bf16, keep),
    "fp32, TF32 products": Arithmetic(to_tf32, keep),
    "fp32, IEEE products": Arithmetic(keep, keep),
    "bf16 state as well": Arithmetic(to_bf16, to_bf16),
}


@dataclass(frozen=True)
class Operands:
    """One head: bf16 values held in fp32."""

    q_TD: Tensor
    k_KD: Tensor
    v_KD: Tensor
    grad_TD: Tensor
    mask_TK: Tensor

    def to(self, dtype: torch.dtype) -> "Operands":
        """In another type; the mask stays."""
        fields = {name: getattr(self, name).to(dtype) for name in self.names()}
        return dataclasses.replace(self, **fields)

    @staticmethod
    def names() -> tuple[str, ...]:
        """Of everything but the mask."""
        return ("q_TD", "k_KD", "v_KD", "grad_TD")


def operands(*, queries: int, keys: int, visible: int, scale: float, seed: int) -> Operands:
    """Gaussian operands; every query sees the first ``visible`` keys, as those of one anchor do."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v, g = (
        to_bf16(torch.randn(n, 128, generator=generator)) for n in (queries, keys, keys, queries)
    )
    mask = (torch.arange(keys) < visible).expand(queries, keys)
    return Operands(to_bf16(q * scale), k, v, g, mask)


def exact(x: Operands) -> tuple[Tensor, ...]:
    """Output and gradients in float64."""
    x = x.to(torch.float64)
    q, k, v = (t.requires_grad_() for t in (x.q_TD, x.k_KD, x.v_KD))
    score = (q @ k.T * q.shape[-1] ** -0.5).masked_fill(~x.mask_TK, -torch.inf)
    out = score.softmax(-1) @ v
    return out.detach(), *torch.autograd.grad(out, (q, k, v), x.grad_TD)


def tiled(x: Operands, how: Arithmetic, order: Tensor | None = None) -> tuple[tuple, float]:
    """Output and gradients before their last rounding, and rescales a query.

    Args:
        x: Operands.
        how: Where to round.
        order: Tiles of keys in the order of their visit; ascending if ``None``.
    """
    rounded, state = how.weight, how.state
    (T, D), K = x.q_TD.shape, len(x.k_KD)
    tiles = torch.arange(K).split(TILE)
    order = torch.arange(len(tiles)) if order is None else order
    high = torch.full((T, 1), -torch.inf)
    total, out, rescales = torch.zeros(T, 1), torch.zeros(T, D), 0
    score = state(x.q_TD @ x.k_KD.T * D**-0.5).masked_fill(~x.mask_TK, -torch.inf)
    for tile in (tiles[i] for i in order.tolist()):
        new = torch.maximum(high, score[:, tile].amax(-1, keepdim=True))
        shift = new.masked_fill(new == -torch.inf, 0.0)
        factor = state(torch.exp(high - shift))
        rescales += int(((new > high) & (high > -torch.inf)).sum())
        weight = state(torch.exp(score[:, tile] - shift))
        total = state(total * factor + weight.sum(-1, keepdim=True))
        out = state(state(out * factor) + rounded(weight) @ x.v_KD[tile])
        high = new
    out = state(out / total)
    P = state(torch.exp(score - state(high + torch.log(total))))
    E = x.grad_TD @ x.v_KD.T
    delta = (to_bf16(out) * x.grad_TD).sum(-1, keepdim=True) if rounded is to_bf16 else None
    delta = (out * x.grad_TD).sum(-1, keepdim=True) if delta is None else delta
    dS = rounded(state(P * (E - delta)))
    results = (out, dS @ x.k_KD * D**-0.5, dS.T @ x.q_TD * D**-0.5, rounded(P).T @ x.grad_TD)
    return results, rescales / T


def errors(found: tuple, truth: tuple) -> dict[str, float]:
    """Relative L2 error of each result, and of the output after its cast to bf16."""
    result = {n: relative_l2(a, b) for n, a, b in zip(NAMES, found, truth, strict=True)}
    return result | {"out_bf16": relative_l2(to_bf16(found[0]), truth[0])}


def ours(x: Operands, anchor: int, impl: str, device: str) -> tuple[tuple, dict[str, float]]:
    """Our `draft_attention` of one block; on a GPU also its time, forward and backward."""
    T, K = x.mask_TK.shape
    S = K - T
    anchors = Anchors(torch.tensor([[anchor]]), torch.ones(1, 1, dtype=torch.bool))
    rule = DraftMask(anchors.to(device), torch.zeros(1, S, dtype=torch.int32, device=device), T)
    built = build_mask(rule, impl=impl)  # pyright: ignore[reportArgumentType]
    values = (t.bfloat16().to(device)[None, None] for t in (x.q_TD, x.k_KD, x.v_KD))
    leaves = [t.requires_grad_() for t in values]
    grad = x.grad_TD.bfloat16().to(device)[None, None]

    def run() -> tuple:
        out = draft_attention(*leaves, mask=built, impl=impl)  # pyright: ignore
        return (out.detach(), *torch.autograd.grad(out, leaves, grad))

    found = tuple(t[0, 0].float().cpu() for t in run())
    times = {}
    if device == "cuda":
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(10):
            run()
        torch.cuda.synchronize()
        times = {"time_ms": (time.perf_counter() - begin) * 100}
    return found, times


def draft_operands(*, context: int, anchor: int, block: int, scale: float, seed: int) -> Operands:
    """Operands of one block at an anchor: the mask of `DraftMask`, context then the block."""
    x = operands(queries=block, keys=context + block, visible=0, scale=scale, seed=seed)
    anchors = Anchors(torch.tensor([[anchor]]), torch.ones(1, 1, dtype=torch.bool))
    mask = DraftMask(anchors, torch.zeros(1, context, dtype=torch.int32), block).dense()[0]
    return dataclasses.replace(x, mask_TK=mask)


def record(sweep: str, x: float | str, path: str, values: dict[str, float]) -> dict:
    """One line of JSON."""
    return {"part": "attention", "sweep": sweep, "at": x, "path": path, **values}


def all_records(device: str, *, keys: int = 4096) -> list[dict]:
    """Every sweep: share of keys that is visible, scale of the logits, order of key tiles."""
    lines = []
    cases: list[tuple[str, float | str, Operands, Tensor | None]] = []
    for share in (0.02, 0.05, 0.17, 0.35, 0.58, 1.0):
        x = operands(queries=64, keys=keys, visible=int(share * keys), scale=1.0, seed=1)
        cases.append(("visible share", share, x, None))
    for scale in (0.25, 1.0, 4.0, 16.0):
        x = operands(queries=64, keys=keys, visible=int(0.17 * keys), scale=scale, seed=2)
        cases.append(("logit scale", scale, x, None))
    x = operands(queries=64, keys=keys, visible=int(0.5 * keys), scale=4.0, seed=3)
    count = -(-keys // TILE)
    shuffled = torch.randperm(count, generator=torch.Generator().manual_seed(4))
    rising = torch.arange(count)
    for name, order in (("ascending", rising), ("descending", rising.flip(0)), ("mixed", shuffled)):
        cases.append(("tile order", name, x, order))
    for sweep, at, x, order in cases:
        truth = exact(x)
        for path, how in ARITHMETIC.items():
            found, rescales = tiled(x, how, order)
            lines.append(record(sweep, at, path, errors(found, truth) | {"rescales": rescales}))
    for share in (0.02, 0.17, 0.5, 1.0):
        x = draft_operands(context=keys, anchor=int(share * keys), block=16, scale=1.0, seed=5)
        truth = exact(x)
        impls = ["reference"] if device == "cpu" else ["reference", *FLEX]
        for impl in impls:
            found, times = ours(x, int(share * keys), impl, device)
            lines.append(record("ours", share, impl, errors(found, truth) | times))
    return lines


FLEX = ("flex_bf16", "flex_fp32_tf32", "flex_fp32_ieee")
