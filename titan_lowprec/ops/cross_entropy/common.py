"""What the reference and the kernels of cross-entropy share: options, checks, split storage."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Int16

from titan_lowprec.shapes import Bool, Float, Int64, Tensor

Impl = Literal["reference", "triton"]


@dataclass(frozen=True, slots=True)
class HeadSpec:
    """Options of `linear_cross_entropy`; ``dataclasses.asdict`` gives its keywords."""

    ignore_index: int
    """Label of a row without a loss (TorchTitan: -100)."""
    chunk_rows: int
    """Rows whose logits exist at once; changes memory and speed, not accuracy."""
    z_loss: float
    """Weight of ``lse ** 2`` per token; 0 leaves it out."""
    softcap: float | None
    """Logits become ``softcap * tanh(logits / softcap)``; ``None`` leaves them."""
    impl: Impl
    """``"reference"`` (PyTorch, any device and dtype) or ``"triton"`` (bf16 on Hopper)."""

    def __post_init__(self) -> None:
        if self.chunk_rows < 1:
            raise ValueError(
                f"HeadSpec: chunk_rows must be at least 1, got {self.chunk_rows}; 2048 is usual"
            )
        check_options(z_loss=self.z_loss, softcap=self.softcap)
        if self.impl not in ("reference", "triton"):
            raise ValueError(
                f"HeadSpec: impl must be 'reference' or 'triton', got {self.impl!r}; "
                "resolve 'auto' before the call"
            )


def check_options(*, z_loss: float, softcap: float | None) -> None:
    """Refuse a negative or non-finite z-loss weight and a soft-cap that is not positive."""
    if not (math.isfinite(z_loss) and z_loss >= 0):
        raise ValueError(
            f"cross_entropy: z_loss must be finite and >= 0, got {z_loss}; pass 0.0 to leave it out"
        )
    if softcap is not None and not (math.isfinite(softcap) and softcap > 0):
        raise ValueError(
            f"cross_entropy: softcap must be finite and > 0, got {softcap}; "
            "pass None to leave it out"
        )


def check_labels(labels_N: Int64[Tensor, " N"], *, vocabulary: int, ignore_index: int) -> None:
    """Refuse labels outside ``[0, vocabulary)`` on a CPU; elsewhere see `label_poison`."""
    if labels_N.dtype != torch.int64:
        raise TypeError(
            f"cross_entropy: labels must be int64, got {labels_N.dtype}; convert with .long()"
        )
    if labels_N.device.type != "cpu" or torch.compiler.is_compiling():
        return
    bad_N = _out_of_range(labels_N, vocabulary=vocabulary, ignore_index=ignore_index)
    if bool(bad_N.any()):
        row = int(bad_N.nonzero()[0])
        raise ValueError(
            f"cross_entropy: labels must be in [0, {vocabulary}) or ignore_index={ignore_index}, "
            f"got {int(labels_N[row])} in row {row} ({int(bad_N.sum())} such rows); "
            "tokenizer and model disagree on the vocabulary"
        )


def check_operands(
    hidden_NE: Tensor, weight_VE: Tensor, labels_N: Tensor, token_weight_N: Tensor | None
) -> None:
    """Refuse operands of `linear_cross_entropy` whose shapes or dtypes do not fit."""
    who = "linear_cross_entropy"
    if hidden_NE.ndim != 2 or weight_VE.ndim != 2 or hidden_NE.shape[1] != weight_VE.shape[1]:
        raise ValueError(
            f"{who}: hidden (N, E) and weight (V, E) must share E, got {tuple(hidden_NE.shape)} "
            f"and {tuple(weight_VE.shape)}; flatten the rows, do not transpose the head"
        )
    if hidden_NE.dtype != weight_VE.dtype:
        raise ValueError(
            f"{who}: hidden and weight must have one dtype, got {hidden_NE.dtype} and "
            f"{weight_VE.dtype}; cast one where the call is made"
        )
    if labels_N.shape != hidden_NE.shape[:1]:
        raise ValueError(
            f"{who}: labels must be ({hidden_NE.shape[0]},), one per row, got "
            f"{tuple(labels_N.shape)}; flatten them like the rows"
        )
    if token_weight_N is None:
        return
    if token_weight_N.shape != labels_N.shape or token_weight_N.dtype != torch.float32:
        raise ValueError(
            f"{who}: token weights must be fp32 ({labels_N.shape[0]},), got "
            f"{token_weight_N.dtype} {tuple(token_weight_N.shape)}; convert and flatten them"
        )
    if token_weight_N.requires_grad:
        raise ValueError(
            f"{who}: token weights are constants, got a tensor that requires a gradient; detach it"
        )


def _out_of_range(
    labels_N: Int64[Tensor, " N"], *, vocabulary: int, ignore_index: int
) -> Bool[Tensor, " N"]:
    return (labels_N != ignore_index) & ((labels_N < 0) | (labels_N >= vocabulary))


def label_poison(
    labels_N: Int64[Tensor, " N"], *, vocabulary: int, ignore_index: int
) -> Float[Tensor, " N"]:
    """1 per row, NaN where the label is out of range.

    Multiplied into a row's loss (and so into its gradients), it refuses a bad label where a check
    would need a device synchronisation or a graph break: the loss of the step becomes NaN.
    """
    bad_N = _out_of_range(labels_N, vocabulary=vocabulary, ignore_index=ignore_index)
    return torch.zeros_like(labels_N, dtype=torch.float32).masked_fill(bad_N, math.nan) + 1.0


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """fp32, or fp64 for fp64 operands."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def split_float32(x_MK: Float[Tensor, "M K"]) -> tuple[Int16[Tensor, "M K"], Int16[Tensor, "M K"]]:
    """Upper and lower 16 bits of fp32 values: the same bytes, kept as two tensors."""
    bits_MK = x_MK.view(torch.int32)
    low_MK = bits_MK.to(torch.int16)  # wraps: keeps the low bits
    return (bits_MK >> 16).to(torch.int16), low_MK


def join_float32(
    high_MK: Int16[Tensor, "M K"], low_MK: Int16[Tensor, "M K"]
) -> Float[Tensor, "M K"]:
    """Inverse of `split_float32`, bit for bit."""
    bits_MK = (high_MK.to(torch.int32) << 16) | (low_MK.to(torch.int32) & 0xFFFF)
    return bits_MK.view(torch.float32)


@dataclass(frozen=True, slots=True)
class Formed:
    """What the forward pass of `linear_cross_entropy` leaves behind, one loss for both passes.

    The gradients are those of the loss sum, not yet rounded: the incoming gradient is multiplied
    in before the one rounding to the operands' dtype.
    """

    loss_sum: Float[Tensor, ""]
    per_token_N: Float[Tensor, " N"]
    lse_N: Float[Tensor, " N"]
    grad_hidden_NE: Float[Tensor, "Ng E"]
    """fp32 (fp64 for fp64); no rows where the hidden state needs no gradient."""
    grad_weight_high_VE: Int16[Tensor, "Vg E"] | Float[Tensor, "Vg E"]
    """Upper halves of fp32 values for a 16-bit head, else the values; no rows if frozen."""
    grad_weight_low_VE: Int16[Tensor, "Vl E"]
    """Lower halves of the same values; no rows for a head of 32 or 64 bits."""

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """The fields in order, as a custom op returns them."""
        return (
            self.loss_sum,
            self.per_token_N,
            self.lse_N,
            self.grad_hidden_NE,
            self.grad_weight_high_VE,
            self.grad_weight_low_VE,
        )


def splits(weight_dtype: torch.dtype) -> bool:
    """Whether the gradient of a head of this dtype is kept as two 16-bit halves."""
    return weight_dtype in (torch.bfloat16, torch.float16)


def row_scale(
    labels_N: Int64[Tensor, " N"],
    token_weight_N: Float[Tensor, " N"] | None,
    *,
    vocabulary: int,
    ignore_index: int,
) -> Float[Tensor, " N"]:
    """What a row's loss is multiplied by: its weight, 0 where ignored, NaN for a bad label."""
    scale_N = label_poison(labels_N, vocabulary=vocabulary, ignore_index=ignore_index)
    if token_weight_N is not None:
        scale_N = scale_N * token_weight_N
    return scale_N.masked_fill(labels_N == ignore_index, 0.0)


def usable_rows(
    hidden_NE: Float[Tensor, "N E"], scale_N: Float[Tensor, " N"]
) -> Float[Tensor, "N E"]:
    """Rows as they are, but with 0 for Inf and NaN in rows whose loss does not count."""
    finite_NE = hidden_NE.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return torch.where((scale_N != 0)[:, None], hidden_NE, finite_NE)
