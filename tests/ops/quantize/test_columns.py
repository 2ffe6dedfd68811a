"""Scale columns hold what every byte means, to the last bit.

Runs on a GPU, or interpreted (see ``tests/ops/attention/test_kernel_interpreted.py``).
"""

import pytest
import torch

pytest.importorskip("triton")

from titan_lowprec.ops.quantize import kernel

INTERPRETED = kernel.interpreted()
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]

BYTES = torch.arange(256, dtype=torch.uint8)


def columns_of_every_byte(*, fold: bool) -> torch.Tensor:
    cu_seqlens = torch.tensor([[0, 256]], dtype=torch.int32, device=DEVICE)
    (blocks,) = kernel.work_lists(cu_seqlens, total_tokens=256, lists=[(32, "document")])
    scale = BYTES[:, None].repeat(1, 3).to(DEVICE)
    return kernel.scale_columns(scale, blocks, scales="token", fold=fold)[:, :256].cpu()


def test_factors_are_the_powers_of_two() -> None:
    expected = torch.tensor([2.0 ** (byte - 127) for byte in range(255)] + [float("nan")])
    for head in columns_of_every_byte(fold=False):
        torch.testing.assert_close(head[:, 0], expected, rtol=0, atol=0, equal_nan=True)


def test_a_fold_has_exponents_with_nan_and_finite_factors_that_undo_them() -> None:
    exponents = torch.tensor([0.0] + [byte - 127.0 for byte in range(1, 255)] + [float("nan")])
    unfold = torch.tensor([2.0 ** -(kernel.SUM_EXPONENT + float(e)) for e in exponents[:255]])
    for head in columns_of_every_byte(fold=True):
        torch.testing.assert_close(head[:, 0], exponents, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(head[:255, 1], unfold, rtol=0, atol=0)
        assert head[255, 1].isfinite()
