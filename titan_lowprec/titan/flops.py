"""Useful FLOPs of a training step over packed documents, and the peak they are measured against."""

import re
from dataclasses import dataclass
from typing import Literal

import torch.nn as nn

from titan_lowprec.shapes import Int32, Tensor


@dataclass(frozen=True, slots=True)
class Peak:
    """A device's dense bf16 matrix rate, the denominator of MFU."""

    name: str
    flops_per_s: float


PEAKS: tuple[tuple[str, Peak], ...] = (
    (r"NVIDIA A100-SXM4-(40|80)GB", Peak("A100 SXM bf16 dense", 312e12)),
    (r"NVIDIA A100-PCI[Ee]-(40|80)GB|NVIDIA A100 80GB PCIe", Peak("A100 PCIe bf16 dense", 312e12)),
    (r"NVIDIA H100 80GB HBM3", Peak("H100 SXM bf16 dense", 989e12)),
    (r"NVIDIA H100 PCIe", Peak("H100 PCIe bf16 dense", 756e12)),
    (r"NVIDIA H100 NVL", Peak("H100 NVL bf16 dense", 835e12)),
    (r"NVIDIA H200", Peak("H200 SXM bf16 dense", 989e12)),
    (r"NVIDIA H200 NVL", Peak("H200 NVL bf16 dense", 835e12)),
    (r"NVIDIA GH200 (480GB|144G HBM3e)", Peak("GH200 bf16 dense", 989e12)),
    (r"NVIDIA B200", Peak("B200 bf16 dense", 2.25e15)),
    (r"NVIDIA GB200", Peak("GB200 bf16 dense", 2.5e15)),
)
"""Device names, matched whole, and NVIDIA's data-sheet rates without sparsity. A part of a device
(MIG) or a chip that is not listed has no peak: another chip's would make MFU wrong by a factor."""


def peak_of(device_name: str) -> Peak | None:
    """The dense bf16 peak of a device, or ``None`` for one that is not in the table.

    Args:
        device_name: What ``torch.cuda.get_device_name`` returns.
    """
    for pattern, peak in PEAKS:
        if re.fullmatch(pattern, device_name):
            return peak
    return None


def training_flops(
    *,
    matmul_parameters: int,
    tokens: int,
    attention_pairs: int,
    n_heads: int,
    head_dim: int,
    n_layers: int,
) -> int:
    """FLOPs that forward and backward of the step need, recomputation left out.

    A weight costs two FLOPs per token forward and four backward. Attention costs, per layer, head
    and visible (query, key) pair, ``2 * 2 * head_dim`` forward (scores and values) and twice that
    backward. Pairs that the mask hides, padding and activation recomputation earn nothing.

    Args:
        matmul_parameters: Weights of matrix products: all linear layers and the output head.
        tokens: Tokens in documents, without padding.
        attention_pairs: Visible pairs of one layer, summed over documents.
        n_heads: Query heads.
        head_dim: Features of a head.
        n_layers: Layers with attention.
    """
    return 6 * matmul_parameters * tokens + 12 * attention_pairs * n_heads * head_dim * n_layers


def attention_pairs(cu_seqlens_RM: Int32[Tensor, "R M"], *, mask: Literal["causal", "full"]) -> int:
    """Visible (query, key) pairs of packed rows, summed over rows and documents.

    Args:
        cu_seqlens_RM: Document offsets of each row, on the CPU; equal offsets are empty documents.
        mask: ``causal`` counts ``n (n + 1) / 2`` pairs for ``n`` tokens, ``full`` counts ``n^2``.
    """
    lengths_RM = cu_seqlens_RM.long().diff(dim=-1)
    squares = int((lengths_RM * lengths_RM).sum())
    return squares if mask == "full" else (squares + int(lengths_RM.sum())) // 2


def matmul_parameters(model_parts: list[nn.Module]) -> int:
    """Weights that take part in matrix products: two axes or more, embeddings left out.

    Sharded parameters count with their global size.
    """
    total = 0
    for part in model_parts:
        embeddings = {
            id(module.weight) for module in part.modules() if isinstance(module, nn.Embedding)
        }
        total += sum(
            parameter.numel()
            for parameter in part.parameters()
            if parameter.ndim >= 2 and id(parameter) not in embeddings
        )
    return total
