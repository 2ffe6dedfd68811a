"""Low-precision training for TorchTitan: FP8/FP4 attention and fp32-reduction cross-entropy."""

__version__ = "0.1.0"
