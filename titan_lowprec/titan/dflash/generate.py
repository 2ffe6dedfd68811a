"""Greedy answers of the target in batches, for training text."""

from collections.abc import Collection

import torch

from titan_lowprec.shapes import Int64, Tensor
from titan_lowprec.titan.dflash.cache import CachedTarget
from titan_lowprec.titan.dflash.target import FrozenTarget


def greedy_answers(
    target: FrozenTarget,
    prompts_BP: Int64[Tensor, "B P"],
    *,
    answer_tokens: int,
    eos_ids: Collection[int],
) -> Int64[Tensor, "B A"]:
    """The target's likeliest continuation of prompts; after an eos token, eos tokens."""
    B, P = prompts_BP.shape
    cached = CachedTarget(target, rows=B, capacity=P + answer_tokens, attention="pytorch")
    logits = cached.next_logits(prompts_BP)
    ends = torch.tensor(sorted(eos_ids), dtype=torch.int64, device=prompts_BP.device)
    done = torch.zeros(B, dtype=torch.bool, device=prompts_BP.device)
    answer: list[Tensor] = []
    for number in range(answer_tokens):
        token = logits.argmax(-1)
        if len(ends):
            token = torch.where(done, ends[0], token)
            done |= torch.isin(token, ends)
        answer.append(token)
        if number + 1 < answer_tokens:
            logits = cached.next_logits(token[:, None])
    return torch.stack(answer, dim=1)
