"""Triton kernels of `linear_cross_entropy`."""

from titan_lowprec.ops.cross_entropy.kernel.launch import form_triton
from titan_lowprec.ops.cross_entropy.kernel.weight_gradient import round_triton

__all__ = ["form_triton", "round_triton"]
