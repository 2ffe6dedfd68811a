"""A target for decoding that keeps nothing but tokens: what caches are compared with."""

from collections.abc import Callable

import torch

from titan_lowprec.models.dflash.decode import TargetStep
from titan_lowprec.shapes import Int64, Tensor


class Recomputing:
    """Evaluates the whole sequence whenever it is extended, and counts how often."""

    def __init__(self, step: Callable[[Tensor], TargetStep]) -> None:
        """Decode with ``step``, which gives logits and features of every token of a sequence."""
        self.step = step
        self.tokens_S: Tensor = torch.empty(0, dtype=torch.int64)
        self.calls = 0

    def extend(self, tokens_S: Int64[Tensor, " S"], *, predictions: int) -> TargetStep:
        """Read the next tokens; see `decode.Target`."""
        self.calls += 1
        before = len(self.tokens_S)
        self.tokens_S = torch.cat((self.tokens_S, tokens_S))
        whole = self.step(self.tokens_S)
        first = len(self.tokens_S) - predictions
        return TargetStep(whole.logits_SV[first:], whole.features_SO[before:])

    def truncate(self, length: int) -> None:
        """Forget all tokens but the first ``length``."""
        assert length <= len(self.tokens_S), "nothing was read there"
        self.tokens_S = self.tokens_S[:length]
