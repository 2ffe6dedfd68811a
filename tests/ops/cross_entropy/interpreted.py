"""Run the kernels under Triton's interpreter, without a GPU; started by test_kernel.py.

A process of its own, since TRITON_INTERPRET is read when the kernels are defined. The interpreter
keeps bf16 as 16-bit integers: it would multiply those in `tl.dot`, and truncates where hardware
rounds. Both are put right here, in the tool that stands in for the hardware.
"""

import json
import os
import sys
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import torch
import torch.distributed as dist
import triton.language as tl
from triton.runtime import interpreter

from titan_lowprec.ops.cross_entropy.common import HeadSpec
from titan_lowprec.ops.cross_entropy.kernel import launch, round_triton, tiles
from titan_lowprec.ops.cross_entropy.reference import form_reference
from titan_lowprec.ops.cross_entropy.shards import VocabularyShard

Builder, Handle = interpreter.InterpreterBuilder, interpreter.TensorHandle


def as_float32(handle):
    if handle.dtype.scalar == tl.bfloat16:
        return (handle.data.astype(np.uint32) << 16).view(np.float32)
    return handle.data


def dot(self, a, b, acc, *_):
    product = np.matmul(as_float32(a), as_float32(b), dtype=np.float32)
    return Handle(product + acc.data, acc.dtype.scalar)


def truncate(self, source, dtype, stock=Builder.create_fp_trunc):
    if dtype.scalar != tl.bfloat16:
        return stock(self, source, dtype)
    rounded = torch.from_numpy(np.ascontiguousarray(source.data, np.float32)).bfloat16()
    codes = rounded.view(torch.int16).numpy().view(np.uint16)
    return Handle(codes.reshape(source.data.shape), tl.bfloat16)


Builder.create_dot, Builder.create_fp_trunc = dot, truncate
launch.LOGITS = tiles.LogitsTile(32, 64, 16, warps=4, stages=2, split=True, resident=1)
launch.WEIGHT = tiles.WeightTile(32, 32, 32, warps=4, stages=2, split=True, resident=1)


def compare(*, std, softcap, chunk_rows, factor, V=97, N=37, E=16, shard=None) -> dict[str, float]:
    """Errors of the kernels against float64, gradients in units of one rounding.

    With a shard, the weight's gradient is compared on this process's rows.
    """
    generator = torch.Generator().manual_seed(V + chunk_rows)
    hidden = torch.randn(N, E, generator=generator).bfloat16()
    weight = (torch.randn(V, E, generator=generator) * std / E**0.5).bfloat16()
    labels = torch.randint(0, V, (N,), generator=generator)
    labels[::4], labels[5:8], labels[21] = -100, 3, V - 1
    hidden[0] = torch.nan  # ignored
    scale = torch.rand(N, generator=generator)
    spec = HeadSpec(-100, chunk_rows, 1e-3, softcap, "triton")
    needs = {"spec": spec, "need_hidden": True, "need_weight": True}
    rows = slice(0, V) if shard is None else slice(shard.first, shard.first + shard.rows)
    local = weight[rows].contiguous()
    mine = launch.form_triton(hidden, local, labels, scale, shard=shard, **needs)
    whole = (hidden.double(), weight.double(), labels, scale)
    truth = form_reference(*whole, shard=None, **needs)
    high = mine.grad_weight_high_VE
    round_triton(high, high, mine.grad_weight_low_VE, torch.tensor(factor), torch.bfloat16)
    grad_hidden = (mine.grad_hidden_NE * factor).bfloat16()
    gradients = (grad_hidden, high.view(torch.bfloat16))
    exact = (truth.grad_hidden_NE * factor, truth.grad_weight_high_VE[rows] * factor)
    valid = labels != -100
    errors = {
        "loss": abs(float(mine.loss_sum.double() / truth.loss_sum) - 1),
        "per_token": float((mine.per_token_N - truth.per_token_N).abs().max()),
        "lse": float((mine.lse_N - truth.lse_N)[valid].abs().max()),
        "ignored": float(mine.per_token_N[~valid].abs().max()),
    }
    for name, actual, expected in zip(("hidden", "weight"), gradients, exact, strict=True):
        floor = (expected.bfloat16().double() - expected).norm()
        errors[name] = float((actual.double() - expected).norm() / floor)
    return errors


def compare_shards(rank, ranks, folder, cases) -> None:
    """One process of a group: its errors go to a file."""
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks)
    shard = VocabularyShard.of_group(97, dist.group.WORLD)
    errors = [compare(**case, shard=shard) for case in cases]
    Path(folder, f"{rank}.json").write_text(json.dumps(errors))
    dist.destroy_process_group()


if __name__ == "__main__":
    cases = json.loads(sys.argv[1])
    if len(sys.argv) > 2:  # rank, ranks, folder
        compare_shards(int(sys.argv[2]), int(sys.argv[3]), sys.argv[4], cases)
    else:
        print(json.dumps([compare(**case) for case in cases]))
