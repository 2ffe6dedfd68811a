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
