"""Run sharded heads in processes of their own, one a shard; each loads the cases from a file."""

import multiprocessing
import os
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile

from titan_lowprec.ops.cross_entropy.api import VocabularyShard, linear_cross_entropy


@dataclass
class Result:
    """What one process got."""

    values: tuple = ()
    """Loss sum, loss per row, LSE."""
    grad_hidden: object = None
    grad_weight: object = None
    gathers: int = 0
    reductions: int = 0
    again: list = field(default_factory=list)
    """Names of the tensors that a second run changed."""
    replayed: list = field(default_factory=list)
    """Names of the tensors in which a CUDA graph's replay differs from an eager run."""


def run_sharded(cases, ranks, folder, *, backend="gloo", device="cpu"):
    """``{case: [Result of rank 0, ...]}`` for cases ``{name: (Head, changes)}``."""
    portable = {
        name: (head.hidden, head.weight, head.labels, head.options(**changes), extra)
        for name, (head, changes, extra) in cases.items()
    }
    torch.save(portable, folder / "cases.pt")
    multiprocessing.set_forkserver_preload([__name__])  # the imports of all processes, once
    args = (ranks, str(folder), backend, device)
    mp.start_processes(_worker, args=args, nprocs=ranks, start_method="forkserver")
    per_rank = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]
    return {name: [Result(**results[name]) for results in per_rank] for name in cases}


def assert_whole(head, factor, results, times_floor):
    """Values equal on all ranks and to float64; gradients at most 1.1 roundings off."""
    truth = head.truth(factor)
    for result in results:
        loss, per_token, lse = result.values
        assert abs(loss.double() / truth["loss"] - 1) < 1e-6
        torch.testing.assert_close(per_token.double(), truth["per_token"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double(), truth["lse"], rtol=2e-6, atol=2e-6)
        for a, b in zip(result.values, results[0].values, strict=True):
            assert torch.equal(a, b)
        assert torch.equal(result.grad_hidden, results[0].grad_hidden)
    weight = torch.cat([result.grad_weight for result in results])
    assert weight.dtype == results[0].grad_hidden.dtype == head.hidden.dtype
    assert times_floor(results[0].grad_hidden, truth["hidden"]) < 1.1
    assert times_floor(weight, truth["weight"]) < 1.1


def _worker(rank, ranks, folder, backend, device):
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if device == "cuda":
        # gloo's processes may share one GPU, NCCL's may not
        torch.cuda.set_device(rank if backend == "nccl" else 0)
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=ranks
    )
    cases = torch.load(f"{folder}/cases.pt", weights_only=False, map_location=device)
    results = {name: asdict(_run(*case)) for name, case in cases.items()}
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def _run(hidden, weight, labels, options, extra):
    extra = dict(extra)
    graph = extra.pop("graph", False)
    shard = VocabularyShard.of_group(weight.shape[0], dist.group.WORLD)
    local = weight[shard.first : shard.first + shard.rows].clone()
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        values, *grads = _once(hidden, local, labels, options, shard, **extra)
    counts = {event.key: event.count for event in profiler.key_averages()}
    repeated, *again = _once(hidden, local, labels, options, shard, **extra)
    return Result(
        values=tuple(value.cpu() for value in values),
        grad_hidden=None if grads[0] is None else grads[0].cpu(),
        grad_weight=None if grads[1] is None else grads[1].cpu(),
        gathers=counts.get("_c10d_functional::all_gather_into_tensor", 0),
        reductions=counts.get("_c10d_functional::all_reduce_", 0),
        again=_differing((*values, *grads), (*repeated, *again)),
        replayed=_replay(hidden, local, labels, options, shard) if graph else [],
    )


def _differing(results, others):
    names = ("loss", "per_token", "lse", "hidden", "weight")
    pairs = zip(names, results, others, strict=True)
    return [name for name, a, b in pairs if a is not None and not torch.equal(a, b)]


def _replay(hidden, local, labels, options, shard):
    """Capture a step, replay it on other rows, and compare with those rows run eagerly."""
    static, head = hidden.clone().requires_grad_(), local.clone().requires_grad_()
    static.grad, head.grad = torch.zeros_like(static), torch.zeros_like(head)
    static_labels = labels.clone()

    def step():
        static.grad.zero_()
        head.grad.zero_()
        results = linear_cross_entropy(static, head, static_labels, **options, shard=shard)
        results[0].backward()
        return [result.detach() for result in results]

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        values = step()
    with torch.no_grad():
        static.copy_(hidden.flip(0) * 50)  # now some tiles need the correction as well
        static_labels.copy_(labels.roll(7))
    graph.replay()
    eager, *grads = _once(static.detach(), local, static_labels, options, shard)
    return _differing((*values, static.grad, head.grad), (*eager, *grads))


def _once(
    hidden, local, labels, options, shard, *, factor=1.0, frozen=(), compiled=False, no_grad=False
):
    hidden = hidden.clone().requires_grad_("hidden" not in frozen)
    local = local.clone().requires_grad_("weight" not in frozen)

    def step(hidden, local, labels):
        return linear_cross_entropy(hidden * 1, local, labels, **options, shard=shard)

    if compiled:
        step = torch.compile(step, fullgraph=True)
    with torch.set_grad_enabled(not no_grad):
        loss, per_token, lse = step(hidden, local, labels)
    if not no_grad:
        (loss * factor).backward()
    return (loss.detach(), per_token, lse), hidden.grad, local.grad
