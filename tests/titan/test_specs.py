"""Implementations are resolved once, and to kernels only where they are meant to run."""

import pytest
import torch

from titan_lowprec.titan.specs import resolve_head_impl


@pytest.mark.parametrize(
    ("capability", "impl"),
    [((8, 0), "reference"), ((9, 0), "triton"), ((10, 0), "reference"), (None, "reference")],
)
def test_the_chunked_head_uses_kernels_on_hopper_alone(monkeypatch, capability, impl):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    assert resolve_head_impl() == impl
