"""Inputs of the head, a float64 truth by autograd, and the rounding floor of a gradient."""

import functools
import os
import zlib
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh


@dataclass
class Head:
    """Operands of one linear cross-entropy."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    token_weight: Tensor | None = None
    z_loss: float = 0.0
    softcap: float | None = None

    def options(self, **changes) -> dict:
        options = {
            "ignore_index": -100,
            "chunk_rows": 64,
            "z_loss": self.z_loss,
            "softcap": self.softcap,
            "token_weight_N": self.token_weight,
            "impl": "reference",
        }
        return options | changes

    def leaves(self) -> tuple[Tensor, Tensor]:
        return self.hidden.clone().requires_grad_(), self.weight.clone().requires_grad_()

    def truth(self, factor: float = 1.0) -> dict[str, Tensor]:
        """float64 values and the gradients of ``factor * loss``."""
        hidden = self.hidden.double().clone().requires_grad_()
        weight = self.weight.double().clone().requires_grad_()
        logits = hidden @ weight.T
        if self.softcap is not None:
            logits = self.softcap * torch.tanh(logits / self.softcap)
        lse = logits.logsumexp(1)
        target = logits.gather(1, self.labels.clamp(min=0)[:, None])[:, 0]
        per_token = (lse - target + self.z_loss * lse.square()) * (self.labels != -100)
        if self.token_weight is not None:
            per_token = per_token * self.token_weight.double()
        loss = per_token.sum()
        grad_hidden, grad_weight = torch.autograd.grad(loss * factor, (hidden, weight))
        return {
            "loss": loss.detach(),
            "per_token": per_token.detach(),
            "lse": lse.detach(),
            "hidden": grad_hidden,
            "weight": grad_weight,
        }


def times_floor(actual: Tensor, truth: Tensor) -> float:
    """Error of a gradient in units of what rounding the exact one to the same dtype costs."""
    floor = (truth.to(actual.dtype).double() - truth).norm()
    return float((actual.double() - truth).norm() / floor)


@pytest.fixture(name="times_floor")
def times_floor_fixture():
    return times_floor


def draw_head(
    seed,
    N,
    E,
    V,
    *,
    dtype=torch.bfloat16,
    std=1.0,
    ignored=0.2,
    device="cpu",
    weighted=False,
    **rest,
) -> Head:
    """Random operands; ``rest`` are options of `Head`."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, device=device)

    labels = torch.randint(0, V, (N,), generator=generator, device=device)
    drop = torch.rand(N, generator=generator, device=device) < ignored
    weights = torch.rand(N, generator=generator, device=device) if weighted else None
    return Head(
        hidden=normal(N, E).to(dtype),
        weight=(normal(V, E) * std / E**0.5).to(dtype),
        labels=labels.masked_fill(drop, -100),
        token_weight=weights,
        **rest,
    )


@pytest.fixture
def make_head(request):
    """``make_head(N, E, V, ...)``, seeded from the test's id."""
    return functools.partial(draw_head, zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture
def one_rank(tmp_path):
    if dist.is_initialized():
        pytest.skip("another test left a process group behind")
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    os.environ.setdefault("LOCAL_RANK", "0")
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()
