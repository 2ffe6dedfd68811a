"""Shapes and inputs that tests and benchmarks share."""

import itertools
from dataclasses import dataclass
from typing import Literal

import torch

from titan_lowprec.shapes import Float, Int32, Tensor

InputKind = Literal["gaussian", "peaked", "outlier_entries", "hot_channel"]

BOUNDARY_LENGTHS = (1, 31, 32, 33, 127, 128, 129)
"""Document lengths around one and several token blocks."""
PEAKS = (0.25, 0.35, 0.45, 0.6, 0.85)
"""Strengths of ``peaked`` inputs: q = strength * k."""


@dataclass(frozen=True, slots=True)
class PackedCase:
    """Packed rows of documents and the heads that attend in them."""

    rows: tuple[tuple[int, ...], ...]
    """Document lengths of each row."""
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype = torch.bfloat16
    tail_tokens: int = 0
    """Tokens past the last document of the fullest row."""

    @property
    def id(self) -> str:
        """Name for a test, such as ``R1-docs31.33-H4-J2-D32-bf16``."""
        documents = "_".join(".".join(map(str, row)) for row in self.rows)
        dtype = {torch.bfloat16: "bf16", torch.float32: "fp32"}[self.dtype]
        tail = f"-tail{self.tail_tokens}" if self.tail_tokens else ""
        return (
            f"R{len(self.rows)}-docs{documents}{tail}-H{self.heads}-J{self.kv_heads}"
            f"-D{self.head_dim}-{dtype}"
        )

    @property
    def row_tokens(self) -> int:
        """Tokens of a row, its tail included."""
        return max(sum(row) for row in self.rows) + self.tail_tokens

    @property
    def total_tokens(self) -> int:
        """Tokens of all rows."""
        return self.row_tokens * len(self.rows)

    @property
    def pairs(self) -> int:
        """Visible query-key pairs of a causal call, of one head."""
        return sum(n * (n + 1) // 2 for row in self.rows for n in row)

    def cu_seqlens(self, *, device: torch.device | str) -> Int32[Tensor, "R M1"]:
        """Offsets of every row, padded to one length by repeating the row's last."""
        capacity = max(len(row) for row in self.rows)
        lines = []
        for row in self.rows:
            line = [0, *itertools.accumulate(row)]
            lines.append(line + [line[-1]] * (capacity + 1 - len(line)))
        return torch.tensor(lines, dtype=torch.int32, device=device)


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """Inputs of one packed attention call and the gradient of its output."""

    q_NHD: Float[Tensor, "N H D"]
    k_NJD: Float[Tensor, "N J D"]
    v_NJD: Float[Tensor, "N J D"]
    grad_out_NHD: Float[Tensor, "N H D"]
    cu_seqlens_RM: Int32[Tensor, "R M1"]

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the gradient of the output."""
        return self.q_NHD, self.k_NJD, self.v_NJD, self.grad_out_NHD


def packed_inputs(
    case: PackedCase, *, kind: InputKind, strength: float, seed: int, device: torch.device | str
) -> PackedInputs:
    """Draw inputs on the CPU, so that every device gets the same ones.

    Args:
        case: Shapes.
        kind: ``"gaussian"``: N(0, 1). ``"peaked"``: q is ``strength`` times its KV head's k, so
            that rows attend to themselves. ``"outlier_entries"``: N(0, ``strength``**2) is added
            to one entry in a thousand of q, k and v. ``"hot_channel"``: one fixed channel of q
            and k is multiplied by ``strength``.
        strength: As said under ``kind``; 1.0 for ``"gaussian"``.
        seed: Of the generator.
        device: Where the inputs go.
    """
    generator = torch.Generator().manual_seed(seed)
    N, D, repeats = case.total_tokens, case.head_dim, case.heads // case.kv_heads

    def normal(heads: int) -> Tensor:
        return torch.randn(N, heads, D, generator=generator)

    q, k, v, g = (normal(h) for h in (case.heads, case.kv_heads, case.kv_heads, case.heads))
    if kind == "peaked":
        q = strength * k.repeat_interleave(repeats, dim=1)
    elif kind == "outlier_entries":
        for x in (q, k, v):
            hit = torch.rand(x.shape, generator=generator) < 1e-3
            x += strength * hit * torch.randn(x.shape, generator=generator)
    elif kind == "hot_channel":
        q[..., 3] *= strength
        k[..., 3] *= strength
    return PackedInputs(
        *(x.to(case.dtype).to(device) for x in (q, k, v, g)),
        cu_seqlens_RM=case.cu_seqlens(device=device),
    )


SMALL_CASES = (
    PackedCase(rows=((128,),), heads=2, kv_heads=2, head_dim=32),
    PackedCase(rows=((1, 31, 33, 64),), heads=4, kv_heads=2, head_dim=64, tail_tokens=7),
    PackedCase(rows=((5, 0, 90), (33,)), heads=3, kv_heads=1, head_dim=32, dtype=torch.float32),
    PackedCase(rows=((1,),), heads=1, kv_heads=1, head_dim=16),
    PackedCase(rows=((32, 127, 129),), heads=4, kv_heads=1, head_dim=128),
)
"""One aligned, two ragged, one of size 1, one with a realistic head dimension."""
