"""Cases and implementations of the head's loss for `run.py --op cross_entropy`.

A pass is forward and backward with an incoming gradient that is not a power of two. FLOPs are
``6 N V E``: three GEMMs, nothing for the softmax. ``error`` is the largest of three numbers, each
1 at its limit: relative error of the loss over 1e-6, and the errors of dX and dW over 1.1 times
what rounding the exact gradient to bf16 costs, all against float64. Ours must stay below 1; the
others are timed whatever their error.
"""

import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from bench_registry import Case, Implementation, Workload
from torch import Tensor

from titan_lowprec.ops.cross_entropy.api import Impl, cross_entropy, linear_cross_entropy

TESTS = ("tests/ops/cross_entropy",)
NOT_JUDGED = 1e9


@dataclass
class Inputs:
    """Operands, incoming gradient, and float64 results."""

    hidden: Tensor
    weight: Tensor
    labels: Tensor
    factor: float
    loss: Tensor
    grad_hidden: Tensor
    grad_weight: Tensor


def cases(suite: str, device: torch.device) -> list[Case]:
    del device
    shapes = {
        "smoke": [(96, 1000, 64)],
        "full": [
            (8192, 163_840, 2048),
            (8192, 128_256, 2048),
            (8192, 163_840, 4096),
            (8192, 128_256, 4096),
            (32_768, 163_840, 2048),
        ],
        "main": [(8192, 163_840, 2048)],
    }[suite]
    return [Case(f"N{N}-V{V}-E{E}-bf16", {"N": N, "V": V, "E": E}) for N, V, E in shapes]


def make_inputs(case: Case, device: torch.device) -> Inputs:
    N, V, E = (case.params[name] for name in "NVE")
    generator = torch.Generator(device).manual_seed(N + V + E)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    hidden = normal(N, E).bfloat16()
    weight = (normal(V, E) / E**0.5).bfloat16()
    labels = torch.randint(0, V, (N,), generator=generator, device=device)
    labels[::17] = -100
    factor = 1.0 / int((labels != -100).sum())
    return Inputs(hidden, weight, labels, factor, *float64_truth(hidden, weight, labels, factor))


def float64_truth(
    hidden: Tensor, weight: Tensor, labels: Tensor, factor: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss sum and the gradients of ``factor * loss``, by blocks of rows."""
    wide = weight.double()
    grad_hidden = torch.empty_like(hidden, dtype=torch.float64)
    grad_weight = torch.zeros_like(wide)
    loss = torch.zeros((), dtype=torch.float64, device=hidden.device)
    for rows in torch.arange(hidden.shape[0], device=hidden.device).split(2048):
        x, y = hidden[rows].double(), labels[rows]
        logits = x @ wide.T
        loss += F.cross_entropy(logits, y, reduction="sum")
        probabilities = torch.softmax(logits, dim=1)
        probabilities[torch.arange(len(rows), device=y.device), y.clamp(min=0)] -= 1
        probabilities *= ((y != -100) * factor)[:, None]
        grad_hidden[rows] = probabilities @ wide
        grad_weight += probabilities.T @ x
    return loss, grad_hidden, grad_weight


def times_floor(actual: Tensor, truth: Tensor) -> float:
    """Error in units of the error of rounding the truth to the same dtype."""
    error = floor = 0.0
    for a, t in zip(actual.split(16_384), truth.split(16_384), strict=True):
        error += float((a.double() - t).square().sum())
        floor += float((t.to(actual.dtype).double() - t).square().sum())
    return (error / floor) ** 0.5


def head_workload(
    function: Callable[[Tensor, Tensor, Tensor], Tensor], inputs: Inputs, tolerance: float
) -> Workload:
    """Forward and backward of ``function(hidden, weight, labels) -> loss sum``."""
    hidden = inputs.hidden.detach().clone().requires_grad_()
    weight = inputs.weight.detach().requires_grad_()

    def step() -> Tensor:
        hidden.grad = weight.grad = None
        loss = function(hidden, weight, inputs.labels)
        (loss * inputs.factor).backward()
        return loss.detach()

    def error() -> float:
        loss = step()
        assert hidden.grad is not None and weight.grad is not None
        worst = [
            abs(float(loss.double() / inputs.loss) - 1) / 1e-6,
            times_floor(hidden.grad, inputs.grad_hidden) / 1.1,
            times_floor(weight.grad, inputs.grad_weight) / 1.1,
        ]
        hidden.grad = weight.grad = None
        return max(worst)

    def timed() -> None:
        step()
        hidden.grad = weight.grad = None

    N, V, E = *inputs.hidden.shape[:1], *inputs.weight.shape
    name = "forward_backward"
    return Workload(
        passes={name: timed},
        flops={name: 6.0 * N * V * E},
        error=error,
        tolerance=tolerance,
        result_bytes={name: 2 * (N + V) * E},
    )


def three_gemms(case: Case, inputs: Inputs) -> Workload:
    """The floor: logits, dX and dW as three bf16 GEMMs on random operands, nothing else."""
    del case
    gradient = inputs.hidden @ inputs.weight.T
    name = "forward_backward"

    def gemms() -> None:
        torch.mm(inputs.hidden, inputs.weight.T, out=gradient)
        torch.mm(gradient, inputs.weight)
        torch.mm(gradient.T, inputs.hidden)

    (N, V), E = gradient.shape, inputs.hidden.shape[1]
    return Workload(
        {name: gemms}, {name: 6.0 * N * V * E}, lambda: 0.0, NOT_JUDGED, {name: 2 * (N + V) * E}
    )


def ours(chunk_rows: int, impl: Impl) -> Implementation:
    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        return linear_cross_entropy(
            hidden,
            weight,
            labels,
            ignore_index=-100,
            chunk_rows=chunk_rows,
            z_loss=0.0,
            softcap=None,
            token_weight_N=None,
            impl=impl,
        )[0]

    def unavailable(device: torch.device) -> str | None:
        if impl == "triton" and device.type != "cuda":
            return "needs a CUDA device"
        if impl == "reference" and device.type == "cuda":
            return "the reference is not for timing on a GPU"
        return None

    return Implementation(
        f"{impl}/{chunk_rows}",
        lambda case, inputs: head_workload(loss, inputs, tolerance=1.0),
        unavailable,
    )


def head_loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = hidden @ weight.T
    return cross_entropy(logits, labels, ignore_index=-100, z_loss=0.0, softcap=None)[0]


def compiled(case: Case, inputs: Inputs) -> Workload:
    torch._dynamo.reset()
    return head_workload(torch.compile(head_loss, dynamic=False), inputs, NOT_JUDGED)


def liger(accum_dtype: torch.dtype | None) -> Callable[[Case, Inputs], Workload]:
    def prepare(case: Case, inputs: Inputs) -> Workload:
        module = importlib.import_module("liger_kernel.transformers.functional")

        def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            return module.liger_fused_linear_cross_entropy(
                hidden, weight, labels, reduction="sum", accum_dtype=accum_dtype
            )

        return head_workload(loss, inputs, NOT_JUDGED)

    return prepare


def cut_cross_entropy(case: Case, inputs: Inputs) -> Workload:
    module = importlib.import_module("cut_cross_entropy")
    return head_workload(
        lambda hidden, weight, labels: module.linear_cross_entropy(
            hidden, weight, labels, reduction="sum"
        ),
        inputs,
        NOT_JUDGED,
    )


def quack(case: Case, inputs: Inputs) -> Workload:
    module = importlib.import_module("quack.linear_cross_entropy")
    return head_workload(
        lambda hidden, weight, labels: module.chunked_linear_cross_entropy(
            hidden, weight, labels, chunk_size=2048, ignore_index=-100, reduction="sum"
        ),
        inputs,
        NOT_JUDGED,
    )


def needs(*modules: str) -> Callable[[torch.device], str | None]:
    """Available on a GPU where the modules are installed."""

    def missing(device: torch.device) -> Iterator[str]:
        if device.type != "cuda":
            yield "a CUDA device"
        yield from (name for name in modules if importlib.util.find_spec(name) is None)

    def unavailable(device: torch.device) -> str | None:
        reasons = list(missing(device))
        return f"needs {', '.join(reasons)}" if reasons else None

    return unavailable


def peer(name: str, prepare: Any, *modules: str) -> Implementation:
    return Implementation(name, prepare, needs(*modules))


IMPLEMENTATIONS = [
    Implementation("three_gemms", three_gemms),
    ours(4096, "triton"),
    ours(2048, "triton"),
    ours(1024, "triton"),
    ours(32, "reference"),
    Implementation("eager", lambda case, inputs: head_workload(head_loss, inputs, NOT_JUDGED)),
    peer("torch_compile", compiled),
    peer("liger", liger(None), "liger_kernel"),
    peer("liger_fp32", liger(torch.float32), "liger_kernel"),
    peer("cut_cross_entropy", cut_cross_entropy, "cut_cross_entropy"),
    peer("quack", quack, "quack", "cutlass"),
]
