"""Triton kernels of attention; see ``launch`` for the entry points."""

from titan_lowprec.ops.attention.kernel.launch import backward_triton, forward_triton
from titan_lowprec.ops.attention.kernel.support import unsupported_reason

__all__ = ["backward_triton", "forward_triton", "unsupported_reason"]
