"""Under FSDP2 the head is gathered once per step, however many chunks there are."""

import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from titan_lowprec.ops.cross_entropy.api import linear_cross_entropy


class LossHead(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.weight = nn.Parameter(head.weight.float())
        self.options = head.options(chunk_rows=8)

    def forward(self, hidden, labels):
        return linear_cross_entropy(hidden, self.weight, labels, **self.options)[0]


def sharded(head, mesh):
    module = LossHead(head)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    module.set_force_sum_reduction_for_comms(True)
    return module


def test_head_is_gathered_once_for_forward_and_once_for_backward(make_head, two_counted_ranks):
    head = make_head(64, 16, 98)
    module = sharded(head, two_counted_ranks)
    with CommDebugMode() as comm:
        module(head.hidden.clone().requires_grad_(), head.labels).backward()
    counts = {str(op): count for op, count in comm.get_comm_counts().items()}
    gathers = sum(count for op, count in counts.items() if "gather" in op)
    # eight chunks; FSDP gathers again before the backward pass because it was asked to reshard
    assert gathers == 2, counts


def test_gradient_under_fsdp_equals_the_plain_one(make_head, one_rank):
    head = make_head(64, 16, 97)
    module = sharded(head, one_rank)
    hidden = head.hidden.clone().requires_grad_()
    (module(hidden, head.labels) / 3).backward()
    weight = head.weight.clone().requires_grad_()
    loss, _, _ = linear_cross_entropy(head.hidden, weight, head.labels, **head.options())
    (loss / 3).backward()
    actual = module.weight.grad.full_tensor()
    torch.testing.assert_close(actual, weight.grad.float(), rtol=1e-2, atol=1e-5)
