"""Differentiable low-precision operations, each with a PyTorch reference and kernels."""
