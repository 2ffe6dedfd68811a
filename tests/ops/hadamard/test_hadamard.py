"""The rotation against the dense matrix, its inverse and its gradient."""

import math

import numpy as np
import pytest
import torch

from titan_lowprec.ops.hadamard.api import hadamard

SIZES = [2**n for n in range(13)]


def sylvester(D: int) -> torch.Tensor:
    """The dense orthonormal matrix, entry by entry, in float64."""
    index = np.arange(D)
    sign = [[(-1) ** (int(i) & int(j)).bit_count() for j in index] for i in index]
    return torch.tensor(sign, dtype=torch.float64) / math.sqrt(D)


@pytest.mark.parametrize("D", SIZES[:9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_equals_the_dense_matrix(D: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(5, D).to(dtype)
    y = hadamard(x.to(device))
    assert (y.dtype, y.shape) == (torch.float32, x.shape)
    exact = x.to(torch.float64) @ sylvester(D)
    assert float((y.cpu() - exact).norm()) <= 2e-7 * math.log2(2 * D) * float(exact.norm())


@pytest.mark.parametrize("D", SIZES)
def test_is_its_own_inverse_and_keeps_norms(D: int, device: torch.device) -> None:
    x = torch.randn(3, D, device=device)
    y = hadamard(x)
    torch.testing.assert_close(hadamard(y), x, rtol=0.0, atol=5e-6)
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("D", [1, 4, 16, 64, 256])
def test_small_integers_rotate_exactly_where_the_root_is_a_power_of_two(
    D: int, device: torch.device
) -> None:
    x = torch.randint(-100, 100, (7, D)).to(torch.float32)
    exact = x.to(torch.float64) @ sylvester(D)
    y = hadamard(x.to(device))
    assert torch.equal(y.cpu().to(torch.float64), exact)
    assert torch.equal(hadamard(y).cpu(), x)


def by_definition(x: np.ndarray) -> np.ndarray:
    """Butterflies one scalar pair at a time, strides upwards, then one fp32 product."""
    y = [np.float32(v) for v in x]
    D, stride = len(y), 1
    while stride < D:
        for i in range(D):
            if i & stride == 0:
                y[i], y[i + stride] = y[i] + y[i + stride], y[i] - y[i + stride]
        stride *= 2
    return np.array([v * np.float32(D**-0.5) for v in y], np.float32)


@pytest.mark.parametrize("D", [2, 8, 64, 128])
def test_bits_follow_the_stated_order_of_operations(D: int, device: torch.device) -> None:
    x = torch.randn(4, D)
    expected = np.stack([by_definition(row) for row in x.numpy()])
    actual = hadamard(x.to(device)).cpu().numpy()
    np.testing.assert_array_equal(actual.view(np.int32), expected.view(np.int32))


@pytest.mark.parametrize("D", [16, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_gradient_is_the_same_rotation(D: int, dtype: torch.dtype, device: torch.device) -> None:
    x = torch.randn(3, 2, D, device=device).to(dtype).requires_grad_()
    grad_y = torch.randn(3, 2, D, device=device)
    (grad_x,) = torch.autograd.grad(hadamard(x), x, grad_y)
    assert grad_x.dtype == dtype
    assert torch.equal(grad_x, hadamard(grad_y).to(dtype))
    exact = grad_y.cpu().to(torch.float64) @ sylvester(D)
    torch.testing.assert_close(
        grad_x.cpu().to(torch.float64),
        exact,
        rtol=1e-2 if dtype == torch.bfloat16 else 1e-5,
        atol=1e-5,
    )


def test_products_of_rotated_rows_are_unchanged() -> None:
    q, k = torch.randn(20, 128), torch.randn(30, 128)
    rotated = hadamard(q).to(torch.float64) @ hadamard(k).to(torch.float64).T
    plain = q.to(torch.float64) @ k.to(torch.float64).T
    assert float((rotated - plain).norm() / plain.norm()) < 5e-7


def test_rows_do_not_depend_on_the_batch_or_on_strides(device: torch.device) -> None:
    x = torch.randn(6, 3, 64, device=device)
    y = hadamard(x)
    assert torch.equal(hadamard(x[4, 1]), y[4, 1])
    assert torch.equal(hadamard(x.transpose(0, 1)), y.transpose(0, 1))
    assert torch.equal(hadamard(x[:, :, ::2]), hadamard(x[:, :, ::2].contiguous()))
    assert hadamard(x[:0]).shape == (0, 3, 64)


def test_one_hot_channel_spreads_evenly(device: torch.device) -> None:
    x = torch.zeros(1, 128, device=device)
    x[0, 37] = 128.0
    assert hadamard(x).abs().unique().numel() == 1


@pytest.mark.parametrize("D", [0, 3, 96])
def test_other_sizes_are_refused(D: int) -> None:
    with pytest.raises(ValueError, match=f"must be a power of two, got {D}"):
        hadamard(torch.zeros(2, D))


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match="must be bfloat16 or float32, got"):
        hadamard(torch.zeros(2, 8, dtype=torch.float64))


@pytest.mark.compile
def test_compiles_without_a_graph_break() -> None:
    x = torch.randn(5, 64)
    compiled = torch.compile(hadamard, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), hadamard(x))
