"""Greedy speculative decoding with a target and a draft, and plain greedy decoding beside it."""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

from titan_lowprec.shapes import Float, Int64, Tensor


@dataclass(frozen=True, slots=True)
class TargetStep:
    """The target's results for tokens that it read."""

    logits_SV: Float[Tensor, "S V"]
    """Of the last tokens, as many as were asked for; each row predicts the token after its own."""
    features_SO: Float[Tensor, "S2 O"]
    """Tapped states, a row for each token."""


@runtime_checkable
class Target(Protocol):
    """A target that keeps what it has read: keys and values, say."""

    def extend(self, tokens_S: Int64[Tensor, " S"], *, predictions: int) -> TargetStep:
        """Read the next tokens of a sequence; the logits are those of the last ``predictions``."""
        ...

    def truncate(self, length: int) -> None:
        """Forget all tokens but the first ``length``."""
        ...


@runtime_checkable
class Draft(Protocol):
    """A draft that keeps what it has seen of a sequence, of which every token is accepted."""

    def propose(
        self, tokens_S: Int64[Tensor, " S"], features_NO: Float[Tensor, "N O"]
    ) -> Int64[Tensor, " P1"]:
        """Say what may follow ``tokens_S``; the features are those that it has not seen.

        Together, all calls since ``reset`` give the features of all tokens but the last.
        """
        ...

    def reset(self) -> None:
        """Forget the sequence."""
        ...


@dataclass(frozen=True, slots=True)
class Decoded:
    """Prompt and continuation, and what each verification accepted."""

    tokens_S: Int64[Tensor, " S"]
    lengths: tuple[int, ...]
    """Tokens that each verification added, the target's own included; the token limit may cut
    the last ones from the output, an eos token ends them."""

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a verification; NaN without one."""
        return sum(self.lengths) / len(self.lengths) if self.lengths else float("nan")

    def distribution(self) -> dict[int, int]:
        """Return how often each length occurred, ascending."""
        return dict(sorted(Counter(self.lengths).items()))


@torch.no_grad()
def greedy_decode(
    target: Target,
    prompt_S: Int64[Tensor, " S"],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int],
) -> Int64[Tensor, " S2"]:
    """Extend a prompt by the target's likeliest tokens, one at a time."""
    target.truncate(0)
    tokens = unread = prompt_S
    for _ in range(max_new_tokens):
        unread = target.extend(unread, predictions=1).logits_SV.argmax(-1)
        tokens = torch.cat((tokens, unread))
        if int(unread) in eos_ids:
            break
    return tokens


@torch.no_grad()
def speculative_decode(
    target: Target,
    draft: Draft,
    prompt_S: Int64[Tensor, " S"],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int],
) -> Decoded:
    """Extend a prompt by what a draft proposes and the target would have chosen.

    The output is plain greedy decoding's, whatever the draft proposes, as long as the target gives
    the same logits for a token whether it reads others with it or not; see `first_divergence`.
    The target reads every accepted token once, and each rejected one once.

    Raises:
        ValueError: The prompt is empty or no token is asked for.
    """
    if len(prompt_S) == 0 or max_new_tokens < 1:
        raise ValueError(
            f"speculative_decode: prompt and max_new_tokens must be at least 1, got "
            f"{len(prompt_S)} and {max_new_tokens}"
        )
    target.truncate(0)
    draft.reset()
    step = target.extend(prompt_S, predictions=1)
    features = step.features_SO
    tokens = torch.cat((prompt_S, step.logits_SV.argmax(-1)))
    end, lengths = len(prompt_S) + max_new_tokens, []
    while len(tokens) < end and int(tokens[-1]) not in eos_ids:
        proposal = draft.propose(tokens, features)
        block = torch.cat((tokens[-1:], proposal))
        step = target.extend(block, predictions=len(block))
        chosen = step.logits_SV.argmax(-1)
        run = int((chosen[:-1] == proposal).long().cumprod(0).sum())
        accepted = _until_eos(chosen[: run + 1], eos_ids)
        features = step.features_SO[: len(accepted)]
        tokens = torch.cat((tokens, accepted))
        target.truncate(len(tokens) - 1)
        lengths.append(len(accepted))
    return Decoded(tokens[:end], tuple(lengths))


def _until_eos(tokens_S: Int64[Tensor, " S"], eos_ids: Collection[int]) -> Tensor:
    for index, token in enumerate(tokens_S.tolist()):
        if token in eos_ids:
            return tokens_S[: index + 1]
    return tokens_S


@dataclass(frozen=True, slots=True)
class Divergence:
    """Where speculative decoding first left plain greedy decoding."""

    index: int
    margin: float
    """Logit of greedy's token less that of the other, by the target on the common prefix: a tie
    in the target's precision, or a fault."""


@torch.no_grad()
def first_divergence(
    logits_of: Callable[[Tensor], Tensor],
    greedy_S: Int64[Tensor, " S"],
    speculative_S: Int64[Tensor, " S2"],
) -> Divergence | None:
    """Compare two continuations of one prompt; in bf16 batches of other sizes differ in bits.

    Args:
        logits_of: The target's logits of a whole sequence, ``(S, V)``.
        greedy_S: Prompt and plain greedy continuation.
        speculative_S: Prompt and speculative continuation.

    Raises:
        ValueError: One is the beginning of the other: they were cut differently.
    """
    common = min(len(greedy_S), len(speculative_S))
    differ = (greedy_S[:common] != speculative_S[:common]).nonzero()
    if len(differ) == 0:
        if len(greedy_S) != len(speculative_S):
            raise ValueError(
                f"first_divergence: equal tokens need equal lengths, got {len(greedy_S)} and "
                f"{len(speculative_S)}; decode both with the same limit and eos tokens"
            )
        return None
    index = int(differ[0])
    logits_V = logits_of(greedy_S[:index])[-1]
    margin = logits_V[greedy_S[index]] - logits_V[speculative_S[index]]
    return Divergence(index, float(margin))
