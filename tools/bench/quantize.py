"""Cases and implementations of quantising attention's operands for `run.py --op quantize`.

The baseline copies as many bytes as the case reads and writes (half each); every other time is to
be read against it: a ratio of 1.25x is 80 % of the copy's bandwidth. ``tflops`` is therefore
terabytes a second here, one "operation" a byte. Bytes are those of codes and values, 128 features
a head; scales, LSE and D are about 1 % more and not counted.
``error`` is the number of code bytes that differ from the reference.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from bench_registry import Case, Implementation, Workload
from torch import Tensor

from titan_lowprec.formats.token_blocks import row_metadata
from titan_lowprec.ops.hadamard.api import hadamard
from titan_lowprec.ops.quantize.api import quantize_token_blocks

TESTS = ("tests/ops/quantize/test_kernel.py",)
TOKENS, HEADS, HEAD_DIM = 65_536, 16, 128
BYTES = {"rows": 3, "columns": 4, "codes": 2, "gradient": 6}
"""Bytes read and written an element: values 2, codes 1, transposed codes 1, output 2."""
LAYOUTS = {"16x4096": (4096,) * 16, "8192+224x256": (8192,) + (256,) * 224}


@dataclass
class Inputs:
    """Values, the output of a forward, offsets, and which operand the case is about."""

    x: Tensor
    out: Tensor
    lse: Tensor
    cu_seqlens: Tensor
    kind: str


def cases(suite: str, device: torch.device) -> list[Case]:
    del device
    layouts = {"smoke": {"2x256": (256, 256)}, "full": LAYOUTS, "main": {"16x4096": (4096,) * 16}}
    return [
        Case(f"{name}-H{HEADS}-{kind}", {"lengths": lengths, "kind": kind})
        for name, lengths in layouts[suite].items()
        for kind in BYTES
    ]


def make_inputs(case: Case, device: torch.device) -> Inputs:
    lengths = case.params["lengths"]
    generator = torch.Generator(device).manual_seed(len(lengths))
    shape = (sum(lengths), HEADS, HEAD_DIM)
    x, out = (torch.randn(*shape, generator=generator, device=device).bfloat16() for _ in range(2))
    lse = torch.randn(shape[:2], generator=generator, device=device)
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    return Inputs(x, out, lse, offsets[None], case.params["kind"])


def workload(inputs: Inputs, function: Callable[[], Any], error: Callable[[], float]) -> Workload:
    moved = BYTES[inputs.kind] * inputs.x.numel()
    return Workload(
        passes={"quantize": function}, flops={"quantize": moved}, error=error, tolerance=0.0
    )


def copy(case: Case, inputs: Inputs) -> Workload:
    """A device copy that reads and writes as many bytes in all."""
    del case
    moved = BYTES[inputs.kind] * inputs.x.numel()
    source = torch.zeros(moved // 2, dtype=torch.uint8, device=inputs.x.device)
    target = torch.empty_like(source)
    return workload(inputs, lambda: target.copy_(source), lambda: 0.0)


def ours(case: Case, inputs: Inputs) -> Workload:
    del case
    from titan_lowprec.ops.quantize import kernel

    x, N = inputs.x, inputs.x.shape[0]
    (blocks,) = kernel.work_lists(inputs.cu_seqlens, total_tokens=N, lists=[(32, "document")])
    none = torch.empty(0, device=x.device)
    rotate = inputs.kind in ("rows", "codes")
    block_N = row_metadata(inputs.cu_seqlens, row_tokens=N).block_index_N

    def operand() -> Any:
        if inputs.kind == "gradient":
            return kernel.quantize_gradient(
                x, inputs.out, none, inputs.lse, blocks, scales="token_block"
            )
        return kernel.quantize_operand(
            x, blocks, scales="token_block", rotate=rotate, transpose=inputs.kind == "columns"
        )

    codes = operand().codes_NHD

    def error() -> float:
        values = hadamard(x) if rotate else x
        expected = quantize_token_blocks(values, block_N, scales="token_block").codes_NHD
        return float((codes.view(torch.uint8) != expected.view(torch.uint8)).sum())

    def transpose() -> Any:
        return kernel.transpose_codes(codes, blocks)

    return workload(inputs, transpose if inputs.kind == "codes" else operand, error)


def needs_cuda(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "needs a CUDA device"


IMPLEMENTATIONS = [
    Implementation("copy", copy, needs_cuda),
    Implementation("triton", ours, needs_cuda),
]
