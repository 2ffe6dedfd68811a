"""NaN-filled memory: a kernel that reads what it did not write shows it."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch

from titan_lowprec.shapes import Tensor


def poisoned(tensor: Tensor) -> Tensor:
    """Fill a tensor with NaN, or, for integers, with the byte 0x7F."""
    if tensor.is_floating_point() and tensor.element_size() > 1:
        return tensor.fill_(torch.nan)
    tensor.view(torch.uint8).fill_(0x7F)
    return tensor


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Poison what ``torch.empty`` and ``torch.empty_like`` return inside the block."""

    def wrap(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def poisoning(*args: Any, **kwargs: Any) -> Tensor:
            return poisoned(allocate(*args, **kwargs))

        return poisoning

    with (
        mock.patch.object(torch, "empty", wrap(torch.empty)),
        mock.patch.object(torch, "empty_like", wrap(torch.empty_like)),
    ):
        yield
