"""Greedy speculative decoding with a target and a draft, and plain greedy decoding beside it."""

from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import dataclass

import torch

from titan_lowprec.models.dflash.anchors import Anchors
from titan_lowprec.models.dflash.attention import Impl, build_mask
from titan_lowprec.models.dflash.masks import DraftMask
from titan_lowprec.models.dflash.model import DraftModel
from titan_lowprec.models.dflash.tables import FrozenTables
from titan_lowprec.shapes import Float, Int64, Tensor


@dataclass(frozen=True, slots=True)
class TargetStep:
    """The target's results for a sequence, one row for each of its tokens."""

    logits_SV: Float[Tensor, "S V"]
    """Row ``t`` predicts token ``t + 1``."""
    features_SO: Float[Tensor, "S O"]
    """Row ``t`` is the tapped state of token ``t``."""


Target = Callable[[Tensor], TargetStep]
"""Evaluates a whole sequence ``tokens_S``; one that caches may compute only what is new."""
Draft = Callable[[Tensor, Tensor], Tensor]
"""Proposes what follows ``tokens_S`` from the features of all of them but the last."""


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


class BlockDraft:
    """Drafts ``block_tokens - 1`` tokens with a draft model, through the code that trains it."""

    def __init__(self, model: DraftModel, tables: FrozenTables, *, impl: Impl) -> None:
        self.model = model
        self.tables = tables
        self.impl: Impl = impl

    @torch.no_grad()
    def __call__(
        self, tokens_S: Int64[Tensor, " S"], features_SO: Float[Tensor, "S1 O"]
    ) -> Int64[Tensor, " P1"]:
        args, context = self.model.args, features_SO.shape[0]
        if tokens_S.shape[0] != context + 1:
            raise ValueError(
                f"BlockDraft: all tokens but the last must have features, got "
                f"{tokens_S.shape[0]} tokens and {context} features; they must not be shifted"
            )
        device, P = tokens_S.device, args.block_tokens
        position_S = torch.arange(context + P, device=device)
        anchors = Anchors(
            torch.full((1, 1), context, device=device),
            torch.ones(1, 1, dtype=torch.bool, device=device),
        )
        document_BS = torch.zeros(1, context, dtype=torch.int64, device=device)
        input_P = torch.full((P,), args.mask_id, device=device)
        input_P[0] = tokens_S[-1]
        hidden_BPE = self.model(
            features_SO[None],
            self.tables.embed(input_P)[None],
            context_position_BS=position_S[None, :context],
            block_position_BT=position_S[None, context:],
            mask=build_mask(DraftMask(anchors, document_BS, P), impl=self.impl),
            impl=self.impl,
        )
        return self.tables.logits(hidden_BPE[0, 1:]).argmax(-1)


@torch.no_grad()
def greedy_decode(
    target: Target,
    prompt_S: Int64[Tensor, " S"],
    *,
    max_new_tokens: int,
    eos_ids: Collection[int],
) -> Int64[Tensor, " S2"]:
    """Extend a prompt by the target's likeliest tokens, one at a time."""
    tokens = prompt_S
    for _ in range(max_new_tokens):
        tokens = torch.cat((tokens, target(tokens).logits_SV[-1:].argmax(-1)))
        if int(tokens[-1]) in eos_ids:
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
    the same logits for a sequence whether it sees more tokens or not; see `first_divergence`.

    Raises:
        ValueError: The prompt is empty or no token is asked for.
    """
    if len(prompt_S) == 0 or max_new_tokens < 1:
        raise ValueError(
            f"speculative_decode: prompt and max_new_tokens must be at least 1, got "
            f"{len(prompt_S)} and {max_new_tokens}"
        )
    step = target(prompt_S)
    tokens = torch.cat((prompt_S, step.logits_SV[-1:].argmax(-1)))
    end, lengths = len(prompt_S) + max_new_tokens, []
    while len(tokens) < end and int(tokens[-1]) not in eos_ids:
        known = len(tokens) - 1
        proposal = draft(tokens, step.features_SO[:known])
        step = target(torch.cat((tokens, proposal)))
        chosen = step.logits_SV[known:].argmax(-1)
        run = int((chosen[:-1] == proposal).long().cumprod(0).sum())
        accepted = _until_eos(chosen[: run + 1], eos_ids)
        tokens = torch.cat((tokens, accepted))
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
    target: Target, greedy_S: Int64[Tensor, " S"], speculative_S: Int64[Tensor, " S2"]
) -> Divergence | None:
    """Compare two continuations of one prompt; in bf16 batches of other sizes differ in bits.

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
    logits_V = target(greedy_S[:index]).logits_SV[-1]
    margin = logits_V[greedy_S[index]] - logits_V[speculative_S[index]]
    return Divergence(index, float(margin))
