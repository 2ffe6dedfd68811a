"""Time and peak memory of a draft's step on a GPU, part by part."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from titan_lowprec.models.dflash.attention import build_mask, draft_attention
from titan_lowprec.models.dflash.loss import draft_loss
from titan_lowprec.models.dflash.masks import DraftMask
from titan_lowprec.models.dflash.model import DraftModel
from titan_lowprec.titan.dflash.batch import anchors_of, blocks_of
from titan_lowprec.titan.dflash.loader import build_draft_loader
from titan_lowprec.titan.dflash.objective import DraftObjective
from titan_lowprec.titan.dflash.store import resolved_args
from titan_lowprec.titan.dflash.target import build_target
from titan_lowprec.titan.merged_config import MergedJobConfig

GIB = 1024**3


@dataclass(frozen=True)
class Part:
    """One part of a step."""

    name: str
    time_ms: float
    """Median over iterations, after two that are not counted."""
    peak_gib: float
    """Above what was allocated before the part."""


def measure(name: str, run: Callable[[], object], *, iterations: int) -> Part:
    """Time a part with CUDA events."""
    times: list[float] = []
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for number in range(iterations + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        if number >= 2:
            times.append(begin.elapsed_time(end))
    peak = (torch.cuda.max_memory_allocated() - before) / GIB
    return Part(name, statistics.median(times), peak)


def time_parts(job_config: MergedJobConfig, *, iterations: int) -> list[Part]:
    """Run the parts of one microbatch of a recipe: one GPU, the draft in the compute type."""
    device, dtype = torch.device("cuda"), torch.bfloat16
    args = resolved_args(job_config)
    assert args.draft is not None
    draft = args.draft
    target = build_target(
        args, job_config, device=device, dtype=dtype, max_positions=job_config.training.seq_len
    )
    objective = DraftObjective(args, job_config, target=target, tables=target.tables)
    with device:
        model = DraftModel(draft).to(dtype)
    model.init_weights()
    host, _ = next(build_draft_loader(1, 0, None, job_config))
    inputs = {name: tensor.to(device) for name, tensor in host.items()}
    blocks = blocks_of(inputs, draft)
    impl = args.attention_impl
    mask = DraftMask(anchors_of(inputs), inputs["document_ids"], draft.block_tokens)
    built = build_mask(mask, impl=impl)
    B, D = len(inputs["input"]), draft.head_dim
    shapes = [(draft.heads, mask.queries), *[(draft.kv_heads, mask.keys)] * 2]
    q, k, v = (
        torch.randn(B, heads, length, D, device=device, dtype=dtype, requires_grad=True)
        for heads, length in shapes
    )
    features = objective.features(inputs)
    objective.features = lambda inputs: features  # pyright: ignore[reportAttributeAccessIssue]
    hidden = objective.hidden(model, inputs, blocks).detach().requires_grad_()

    def attention() -> None:
        out = draft_attention(q, k, v, mask=built, impl=impl)
        out.backward(out.detach())

    def layers() -> None:
        out = objective.hidden(model, inputs, blocks)
        out.backward(out.detach())

    options: Any = {
        "objective": job_config.dflash.objective,
        "chunk_rows": job_config.loss.chunk_rows,
        "impl": objective.head,
    }

    def loss() -> None:
        draft_loss(hidden, blocks, target.tables, **options).loss_sum.backward()

    parts: dict[str, Callable[[], object]] = {
        "target, layers up to the last tap": lambda: DraftObjective.features(objective, inputs),
        "mask": lambda: build_mask(mask, impl=impl),
        "draft layers, forward and backward": layers,
        f"  attention of one layer, {impl}": attention,
        f"head and loss, {objective.head}, forward and backward": loss,
    }
    return [measure(name, run, iterations=iterations) for name, run in parts.items()]
