"""How far losses over a large vocabulary are from float64, ours beside PyTorch's own.

    python tools/audit_reductions.py                             # cross-entropy
    python tools/audit_reductions.py --draft titan_lowprec/models  # attention too, and the claims

On a CPU, bf16 operands. A path is exact if its loss is within 1e-6 of float64, if dX and dW are
within 1.1 times what rounding the exact gradients to bf16 costs, and if a micro-batch whose labels
are all ignored gives zero gradients. The program fails if one of ours is not exact. PyTorch's
chunked operator (`torch.nn.functional.linear_cross_entropy` with options, new in 2.13) is known
not to be exact in the versions listed in `KNOWN_INEXACT`; in another version the table decides,
and a path that has become exact is named so that this file can be brought up to date.
"""

import argparse
import json
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_lowprec.ops.cross_entropy.api import cross_entropy, linear_cross_entropy

KNOWN_INEXACT = ("2.13",)
LossFunction = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Finding:
    """Errors of one path; gradients in units of one bf16 rounding."""

    path: str
    loss_error: float
    hidden_times_floor: float
    weight_times_floor: float
    all_ignored: str

    @property
    def exact(self) -> bool:
        gradients = max(self.hidden_times_floor, self.weight_times_floor)
        return self.loss_error < 1e-6 and gradients < 1.1 and self.all_ignored == "zero"


def ours(chunk_rows: int) -> LossFunction:
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
            impl="reference",
        )[0]

    return loss


def ours_from_fp32_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = hidden.float() @ weight.float().T
    return cross_entropy(logits, labels, ignore_index=-100, z_loss=0.0, softcap=None)[0]


def rounded_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = hidden @ weight.T
    return cross_entropy(logits, labels, ignore_index=-100, z_loss=0.0, softcap=None)[0]


def stock(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(hidden @ weight.T, labels, reduction="sum")


Policy = Literal["accurate", "balanced", "compact", "auto"]


def stock_chunked(policy: Policy, chunk_rows: int | None, reduction: str = "sum") -> LossFunction:
    chunks = {"chunking_method": None, "batch_chunk_size": chunk_rows} if chunk_rows else {}
    options = torch.nn.LinearCrossEntropyOptions(acc_policy=policy, **chunks)

    def loss(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
        value = F.linear_cross_entropy(
            hidden, weight, labels, reduction=reduction, ignore_index=-100, options=options
        )
        # the mean over valid rows is the one that divides by 0 when there are none
        return value if reduction == "sum" else value * (labels != -100).sum().clamp(min=1)

    return loss


def paths() -> dict[str, LossFunction]:
    table: dict[str, LossFunction] = {
        "ours, fp32 logits": ours_from_fp32_logits,
        "ours, chunks of 4": ours(4),
        "ours, chunks of 64": ours(64),
        "ours, one chunk": ours(10**9),
        "ours, logits rounded to bf16 (*)": rounded_logits,
        "torch cross_entropy, bf16 logits": stock,
    }
    if hasattr(torch.nn, "LinearCrossEntropyOptions"):
        policies: tuple[Policy, ...] = ("accurate", "balanced", "compact")
        for policy in policies:
            table[f"torch chunked {policy}, one chunk"] = stock_chunked(policy, 10**6)
            table[f"torch chunked {policy}, 64 rows"] = stock_chunked(policy, 64)
        table["torch chunked auto, 4 rows"] = stock_chunked("auto", 4)
        table["torch chunked auto, default"] = stock_chunked("auto", None)
        table["torch chunked auto, default, mean"] = stock_chunked("auto", None, "mean")
    return table


def truth(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h, w = hidden.double().requires_grad_(), weight.double().requires_grad_()
    loss = F.cross_entropy(h @ w.T, labels, reduction="sum")
    grad_h, grad_w = torch.autograd.grad(loss, (h, w))
    return loss.detach(), grad_h, grad_w


def differentiate(
    path: LossFunction, hidden: Tensor, weight: Tensor, labels: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    h, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loss = path(h, w, labels)
        loss.backward()
    assert h.grad is not None and w.grad is not None
    return loss.detach(), h.grad, w.grad


def times_floor(actual: Tensor, exact: Tensor) -> float:
    floor = (exact.to(actual.dtype).double() - exact).norm()
    return float((actual.double() - exact).norm() / floor)


def audit(name: str, path: LossFunction, N: int, V: int, E: int) -> Finding:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, E, generator=generator).bfloat16()
    weight = (torch.randn(V, E, generator=generator) / E**0.5).bfloat16()
    labels = torch.randint(0, V, (N,), generator=generator)
    exact = truth(hidden, weight, labels)
    actual = differentiate(path, hidden, weight, labels)
    _, *nothing = differentiate(path, hidden, weight, torch.full_like(labels, -100))
    kind = "zero" if all(bool((one == 0).all()) for one in nothing) else "not zero"
    return Finding(
        name,
        abs(float(actual[0].double() / exact[0]) - 1),
        times_floor(actual[1], exact[1]),
        times_floor(actual[2], exact[2]),
        "NaN" if any(bool(one.isnan().any()) for one in nothing) else kind,
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--json", action="store_true", help="print JSON lines, not a table")
    parser.add_argument("--draft", type=Path, help="folder for the audit of draft training")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="of --draft")
    arguments = parser.parse_args()
    if arguments.draft is not None:
        import audit_claims

        audit_claims.write(arguments.draft, arguments.device)
        return 0
    shape = (arguments.rows, arguments.vocabulary, arguments.width)
    if not arguments.json:
        print(f"torch {torch.__version__}, N, V, E = {shape}, bf16")
        print(f"{'path':36} {'loss':>8} {'dX':>6} {'dW':>6}  all ignored")
    failed = False
    for name, path in paths().items():
        finding = audit(name, path, *shape)
        if arguments.json:
            print(json.dumps({**asdict(finding), "exact": finding.exact}))
        else:
            print(
                f"{name:36} {finding.loss_error:8.1e} {finding.hidden_times_floor:6.2f} "
                f"{finding.weight_times_floor:6.2f}  {finding.all_ignored:9}"
                f"{'exact' if finding.exact else ''}"
            )
        failed |= name.startswith("ours") and not name.endswith("(*)") and not finding.exact
        version = ".".join(torch.__version__.split(".")[:2])
        if name.startswith("torch chunked") and finding.exact and version in KNOWN_INEXACT:
            print(f"note: '{name}' is exact here, although torch {version} is in KNOWN_INEXACT")
    if not hasattr(torch.nn, "LinearCrossEntropyOptions") and not arguments.json:
        print(f"torch {torch.__version__} has no chunked linear cross-entropy of its own")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
