"""Cases and implementations of packed causal attention for `run.py --op attention`.

All of ours take bf16 q, k, v; one forward is quantise + forward, one backward is quantise (the
gradient) + backward. ``quantise`` alone and the work lists (``lists``) are passes of their own.
FLOPs count visible pairs only: 4 pairs d H forward, 10 pairs d H backward, whatever a kernel
recomputes. ``error`` is the relative L2 error of the output's first document against float64; the
FP8 rows must stay below 0.06, those with NVFP4 scores below 0.15, bf16 rows below 5e-3.
"""

import importlib
import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from bench_registry import Case, Implementation, Workload
from cudnn_fp8 import CudnnFp8
from cudnn_fp8 import missing as cudnn_frontend_missing
from torch import Tensor

from titan_lowprec.ops.attention.spec import AttentionSpec

TESTS = ("tests/ops/attention/test_kernel.py",)
TOKENS = 65_536
HEADS, HEAD_DIM = 16, 128
LAYOUTS = {
    "16x4096": (4096,) * 16,
    "8192+224x256": (8192,) + (256,) * 224,
    "32x2048": (2048,) * 32,
    "64x1024": (1024,) * 64,
    "1x65536": (65_536,),
    "1x32768": (32_768,),
}
# Equal tokens and equal sums of squares: only the order of the documents differs.
ORDERS = {
    "longest_first": (8192,) + (256,) * 224,
    "longest_middle": (256,) * 112 + (8192,) + (256,) * 112,
    "longest_last": (256,) * 224 + (8192,),
}
MANY = {"131072_by_1024": (1024,) * 128, "131072_uneven": (32_768,) * 2 + (256,) * 256}


@dataclass
class Inputs:
    """Packed operands ``(N, H, D)``, offsets, and the first document's output in float64."""

    q: Tensor
    k: Tensor
    v: Tensor
    grad: Tensor
    cu_seqlens: Tensor
    lengths: tuple[int, ...]
    truth: Tensor

    @property
    def dense(self) -> bool:
        """Whether all documents have one length."""
        return len(set(self.lengths)) == 1


def cases(suite: str, device: torch.device) -> list[Case]:
    del device
    if suite == "smoke":
        return [Case("2x256-H4-J2", {"lengths": (256, 256), "heads": 4, "kv_heads": 2})]
    layouts = LAYOUTS | ORDERS | MANY
    chosen = {
        "full": [(name, j) for name in LAYOUTS for j in (16, 4)],
        "main": [("16x4096", 16), ("8192+224x256", 16)],
        "order": [(name, 16) for name in ORDERS],
        "memory": [(name, 4) for name in MANY],
    }[suite]
    return [
        Case(f"{name}-H{HEADS}-J{j}", {"lengths": layouts[name], "heads": HEADS, "kv_heads": j})
        for name, j in chosen
    ]


def make_inputs(case: Case, device: torch.device) -> Inputs:
    lengths, H, J = (case.params[name] for name in ("lengths", "heads", "kv_heads"))
    D = case.params.get("head_dim", HEAD_DIM)
    generator = torch.Generator(device).manual_seed(len(lengths) + J)

    def normal(heads: int) -> Tensor:
        shape = (sum(lengths), heads, D)
        return torch.randn(*shape, generator=generator, device=device).bfloat16()

    q, k, v, grad = normal(H), normal(J), normal(J), normal(H)
    offsets = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
    return Inputs(q, k, v, grad, offsets[None], lengths, last_rows_truth(q, k, v, lengths[0]))


def last_rows_truth(q: Tensor, k: Tensor, v: Tensor, length: int) -> Tensor:
    """Output of the first document's last rows (128 at most) in float64."""
    rows = slice(max(0, length - 128), length)
    a, b, c = (x.transpose(0, 1).double() for x in (q[rows], k[:length], v[:length]))
    b, c = (x.repeat_interleave(a.shape[0] // x.shape[0], 0) for x in (b, c))
    score = a @ b.transpose(1, 2) * q.shape[2] ** -0.5
    position = torch.arange(length, device=q.device)
    score = score.masked_fill(position[None, :] > position[rows][:, None], -math.inf)
    return (score.softmax(-1) @ c).transpose(0, 1)


def workload(
    inputs: Inputs,
    forward: Callable[[], Any],
    both: Callable[[], Any],
    out: Callable[[], Tensor],
    tolerance: float,
    extra: dict[str, Callable[[], Any]] | None = None,
) -> Workload:
    pairs = sum(n * (n + 1) // 2 for n in inputs.lengths)
    unit = 2.0 * pairs * HEAD_DIM * inputs.q.shape[1]

    def error() -> float:
        length = inputs.lengths[0]
        found = out()[max(0, length - 128) : length].double()
        return float((found - inputs.truth).norm() / inputs.truth.norm())

    return Workload(
        passes={"forward": forward, "forward_backward": both} | (extra or {}),
        flops={"forward": 2 * unit, "forward_backward": 7 * unit},
        error=error,
        tolerance=tolerance,
    )


def ours(name: str, spec: AttentionSpec, tolerance: float) -> Implementation:
    def prepare(case: Case, inputs: Inputs) -> Workload:
        del case
        from titan_lowprec.ops.attention.kernel import backward_triton, forward_triton, launch

        operands = (inputs.q, inputs.k, inputs.v, inputs.cu_seqlens)

        def forward() -> Any:
            return forward_triton(*operands, spec)

        def both() -> None:
            backward_triton(inputs.grad, forward(), inputs.cu_seqlens, spec)

        def quantise() -> None:
            launch.encode_all(*operands, inputs.grad, saved, spec)

        def lists() -> None:
            launch.build_lists(inputs.q, inputs.cu_seqlens, spec)

        saved = forward()
        extra: dict[str, Callable[[], Any]] = {"lists": lists}
        if spec.quantised:
            extra["quantise"] = quantise
        return workload(inputs, forward, both, lambda: forward().out_NHD, tolerance, extra)

    return Implementation(name, prepare, needs_cuda)


def needs_cuda(device: torch.device) -> str | None:
    return None if device.type == "cuda" else "needs a CUDA device"


def autograd_workload(
    inputs: Inputs, function: Callable[[Tensor, Tensor, Tensor], Tensor], layout: str
) -> Workload:
    """A peer that takes ``(B, H, T, D)`` (``"dense"``, ``"row"``) or packed tensors."""

    def arrange(x: Tensor) -> Tensor:
        if layout == "packed":
            return x
        batch = len(inputs.lengths) if layout == "dense" else 1
        return x.unflatten(0, (batch, -1)).transpose(1, 2).contiguous()

    leaves = [arrange(x).requires_grad_() for x in (inputs.q, inputs.k, inputs.v)]
    grad = arrange(inputs.grad)

    def both() -> None:
        torch.autograd.grad(function(*leaves), leaves, grad)

    def out() -> Tensor:
        result = function(*leaves).detach()
        return result if layout == "packed" else result.transpose(1, 2).flatten(0, 1)

    return workload(inputs, lambda: function(*leaves), both, out, 5e-3)


def flex(case: Case, inputs: Inputs) -> Workload:
    """FlexAttention with a document mask: TorchTitan's own packed path."""
    del case
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch._dynamo.reset()
    compiled = torch.compile(flex_attention)
    tokens = inputs.q.shape[0]
    position = torch.arange(tokens, device=inputs.q.device)
    document = torch.searchsorted(inputs.cu_seqlens[0, 1:].contiguous(), position, right=True)

    def visible(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return (i >= j) & (document[i] == document[j])

    mask = create_block_mask(visible, None, None, tokens, tokens, device=inputs.q.device)
    grouped = inputs.k.shape[1] != inputs.q.shape[1]

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return compiled(q, k, v, block_mask=mask, enable_gqa=grouped)

    return autograd_workload(inputs, function, "row")


def varlen(case: Case, inputs: Inputs) -> Workload:
    """PyTorch's variable-length attention (flash-attention 2); KV heads are repeated for it."""
    del case
    from torch.nn.attention.varlen import varlen_attn

    offsets, longest = inputs.cu_seqlens[0], max(inputs.lengths)
    repeats = inputs.q.shape[1] // inputs.k.shape[1]

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (x.repeat_interleave(repeats, 1) for x in (k, v))
        options = causal_options(varlen_attn)
        result = varlen_attn(q, k, v, offsets, offsets, longest, longest, **options)
        return result[0] if isinstance(result, tuple) else result

    return autograd_workload(inputs, function, "packed")


def causal_options(function: Callable[..., Any]) -> dict[str, Any]:
    """How a release of ``varlen_attn`` spells causal."""
    import inspect

    names = inspect.signature(function).parameters
    return {"is_causal": True} if "is_causal" in names else {"window_size": (-1, 0)}


def cudnn(case: Case, inputs: Inputs) -> Workload:
    """cuDNN through SDPA, on documents of equal length as a dense batch."""
    del case
    from torch.nn.attention import SDPBackend, sdpa_kernel

    if not inputs.dense:
        raise ValueError("cudnn: documents must have one length, as a dense batch; not this case")
    grouped = inputs.k.shape[1] != inputs.q.shape[1]

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)

    return autograd_workload(inputs, function, "dense")


def cudnn_fp8(case: Case, inputs: Inputs) -> Workload:
    """cuDNN's FP8 attention on documents of equal length; casts are in its times, as in ours."""
    del case
    if not inputs.dense:
        raise ValueError("cudnn_fp8: documents must have one length, as a dense batch")
    batch = len(inputs.lengths)
    q, k, v, grad = (
        x.unflatten(0, (batch, -1)).transpose(1, 2)
        for x in (inputs.q, inputs.k, inputs.v, inputs.grad)
    )
    peer = CudnnFp8(q, k, v)
    peer.calibrate(grad)

    def both() -> None:
        peer.run_forward()
        peer.run_backward(grad)

    def out() -> Tensor:
        peer.run_forward()
        return peer.output().transpose(1, 2).flatten(0, 1)

    return workload(inputs, peer.run_forward, both, out, 0.1)


def needs_cudnn_frontend(device: torch.device) -> str | None:
    return needs_cuda(device) or cudnn_frontend_missing()


def flash_attention_4(case: Case, inputs: Inputs) -> Workload:
    """flash-attn-4's variable-length attention on Hopper, in bf16."""
    del case
    varlen = importlib.import_module("flash_attn.cute.interface").flash_attn_varlen_func
    offsets, longest = inputs.cu_seqlens[0], max(inputs.lengths)

    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = varlen(
            q, k, v, cu_seqlens_q=offsets, cu_seqlens_k=offsets, max_seqlen_q=longest,
            max_seqlen_k=longest, causal=True,
        )  # fmt: skip
        return result[0] if isinstance(result, tuple) else result

    return autograd_workload(inputs, function, "packed")


def needs_flash_attention_4(device: torch.device) -> str | None:
    if device.type == "cuda" and importlib.util.find_spec("cutlass") is None:
        return "flash-attn-4 and nvidia-cutlass-dsl are not installed"
    return needs_cuda(device)


MXFP8 = AttentionSpec.mxfp8(mask="causal")
MIXED = AttentionSpec.nvfp4_mixed(mask="causal")
SPECS = {
    "mxfp8": MXFP8,
    "mxfp8-wide": replace(MXFP8, tile_k=128),
    "mxfp8-strict": replace(MXFP8, scales="token"),
    "nvfp4_mixed": MIXED,
    "nvfp4_mixed-wide": replace(MIXED, tile_k=128),
    "bf16": AttentionSpec.bf16(mask="causal"),
}
TOLERANCES = {"mxfp8": 0.06, "nvfp4_mixed": 0.15, "bf16": 5e-3}
IMPLEMENTATIONS = [
    Implementation("flex_attention", flex, needs_cuda),
    *(ours(name, spec, TOLERANCES[spec.recipe]) for name, spec in SPECS.items()),
    Implementation("varlen_attn", varlen, needs_cuda),
    Implementation("cudnn", cudnn, needs_cuda),
    Implementation("cudnn_fp8", cudnn_fp8, needs_cudnn_frontend),
    Implementation("flash_attn_4", flash_attention_4, needs_flash_attention_4),
]
