"""Triton kernels of `linear_cross_entropy`."""

from titan_lowprec.ops.cross_entropy.kernel.launch import form_triton, scale_triton

__all__ = ["form_triton", "scale_triton"]
