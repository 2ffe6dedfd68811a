"""The rotation on the tensor cores against the dense matrix in float64.

On a GPU, or interpreted (see ``tests/ops/attention/test_kernel_interpreted.py``).
"""

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from tests.ops.hadamard.test_hadamard import sylvester  # noqa: E402
from titan_lowprec.ops.hadamard.kernel import hadamard_product  # noqa: E402
from titan_lowprec.ops.quantize.kernel import interpreted  # noqa: E402

DEVICE = "cpu" if interpreted() else "cuda"
pytestmark = [] if interpreted() else [pytest.mark.gpu]
ROWS = 64


@triton.jit
def rotate_tile(x_ptr, y_ptr, ROWS: tl.constexpr, D: tl.constexpr, TYPE: tl.constexpr):
    at = tl.arange(0, ROWS)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(y_ptr + at, hadamard_product(tl.load(x_ptr + at), ROWS, D, TYPE))


def rotated(x: torch.Tensor) -> torch.Tensor:
    y = torch.full_like(x, float("nan"), device=DEVICE)
    element = tl.float32 if interpreted() else tl.bfloat16
    rotate_tile[(1,)](x.to(DEVICE), y, ROWS=ROWS, D=x.shape[1], TYPE=element)
    return y.cpu()


@pytest.mark.parametrize("scale", [1e-20, 1.0, 1e20])
@pytest.mark.parametrize("D", [16, 32, 64, 128])
def test_product_is_the_dense_matrix_to_two_to_the_minus_sixteen(D: int, scale: float) -> None:
    x = torch.randn(ROWS, D) * scale
    exact = x.to(torch.float64) @ sylvester(D) * D**0.5
    error = (rotated(x) - exact).norm(dim=1) / exact.norm(dim=1)
    assert float(error.max()) <= 2**-16


def test_every_entry_of_the_matrix_has_its_place() -> None:
    x = torch.zeros(128, 128)
    x.fill_diagonal_(1.0)
    y = torch.cat([rotated(x[:ROWS]), rotated(x[ROWS:])])
    assert torch.equal(y, (sylvester(128) * 128**0.5).round().to(torch.float32))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_not_finite_in_its_row_alone(value: float) -> None:
    x = torch.randn(ROWS, 64)
    x[3, 17] = value
    finite = rotated(x).isfinite()
    assert not finite[3].any()
    assert finite[torch.arange(ROWS) != 3].all()
