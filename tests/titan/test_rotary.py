"""Rotation in real numbers is the complex product of TorchTitan and of float64."""

import pytest
import torch
from torchtitan.models.llama3.model.model import apply_rotary_emb, precompute_freqs_cis

from titan_lowprec.titan.llama3.rotary import rotate, rotation_of

B, T, H, D, S = 2, 37, 3, 16, 64


def problem(dtype=torch.float32):
    q, k = torch.randn(B, T, H, D).to(dtype), torch.randn(B, T, 1, D).to(dtype)
    return q, k, precompute_freqs_cis(D, S, 500000.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [None, 1, B])
def test_rotation_is_torchtitans(dtype, rows):
    q, k, freqs_cis = problem(dtype)
    positions = None if rows is None else torch.randint(S, (rows, T))
    theirs = apply_rotary_emb(q, k, freqs_cis, positions)
    rotation = rotation_of(freqs_cis, positions, tokens=T)
    torch.testing.assert_close((rotate(q, rotation), rotate(k, rotation)), theirs)


def test_values_and_gradients_equal_float64():
    q, _, freqs_cis = problem()
    positions = torch.randint(S, (B, T))
    grad = torch.randn(B, T, H, D)
    x = q.requires_grad_()
    out = rotate(x, rotation_of(freqs_cis, positions, tokens=T))
    (ours,) = torch.autograd.grad(out, x, grad)
    angle = torch.view_as_real(freqs_cis).double()
    turn = torch.complex(angle[..., 0], angle[..., 1])[positions][:, :, None]
    pairs = torch.view_as_complex(q.detach().double().unflatten(-1, (-1, 2)))
    grads = torch.view_as_complex(grad.double().unflatten(-1, (-1, 2)))
    truth = torch.view_as_real(pairs * turn).flatten(-2)
    true_grad = torch.view_as_real(grads * turn.conj()).flatten(-2)
    torch.testing.assert_close(out.double(), truth, rtol=0, atol=1e-6)
    torch.testing.assert_close(ours.double(), true_grad, rtol=0, atol=1e-6)
