"""Small drafts, batches and tables that the tests of DFlash share."""

import dataclasses
from dataclasses import dataclass

import pytest
import torch

from titan_lowprec.models.dflash.anchors import Anchors, AnchorSampler, anchor_candidates
from titan_lowprec.models.dflash.args import DFlashArgs
from titan_lowprec.models.dflash.attention import build_mask
from titan_lowprec.models.dflash.blocks import Blocks, draft_blocks
from titan_lowprec.models.dflash.masks import DraftMask
from titan_lowprec.models.dflash.model import DraftModel
from titan_lowprec.models.dflash.tables import FrozenTables

ARGS = DFlashArgs(
    vocab_size=37,
    model_dim=24,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
    hidden_dim=40,
    norm_eps=1e-6,
    rope_theta=10_000.0,
    tap_layers=(1, 3),
    target_layers=8,
    mask_id=36,
    block_tokens=5,
    anchor_slots=6,
    gamma=3.0,
)


@pytest.fixture
def make_args():
    return lambda **changes: dataclasses.replace(ARGS, **changes)


@pytest.fixture
def make_anchors():
    """Anchors from rows of positions; ``None`` is an unused slot."""

    def make(*rows, unused=0):
        position = [[unused if p is None else p for p in row] for row in rows]
        keep = [[p is not None for p in row] for row in rows]
        return Anchors(torch.tensor(position), torch.tensor(keep))

    return make


@pytest.fixture
def make_tables():
    def make(args, *, dtype=torch.float32, std=1.0, **changes):
        embed, head = (std * torch.randn(args.vocab_size, args.model_dim) for _ in range(2))
        options = {"embed_scale": 1.0, "output_multiplier": 1.0, "softcap": None} | changes
        return FrozenTables(embed.to(dtype), head.to(dtype), **options)

    return make


@dataclass
class Batch:
    """Rows of documents with random tokens, loss mask and features."""

    args: DFlashArgs
    tokens: torch.Tensor
    loss_mask: torch.Tensor
    document: torch.Tensor
    position: torch.Tensor
    features: torch.Tensor
    anchors: Anchors

    @property
    def mask(self) -> DraftMask:
        return DraftMask(self.anchors, self.document, self.args.block_tokens)

    @property
    def blocks(self) -> Blocks:
        return draft_blocks(
            self.tokens,
            loss_mask_BS=self.loss_mask,
            document_BS=self.document,
            position_BS=self.position,
            anchors=self.anchors,
            args=self.args,
        )

    def hidden(self, model: DraftModel, tables: FrozenTables, *, impl="reference"):
        blocks = self.blocks
        return model(
            self.features,
            tables.embed(blocks.input_BT),
            context_position_BS=self.position,
            block_position_BT=blocks.position_BT,
            mask=build_mask(self.mask, impl=impl),
            impl=impl,
        )


@pytest.fixture
def make_batch():
    """A batch from rows of document lengths; what is left of a row is a tail."""

    def make(args, *rows, tokens, learned=1.0, seed=0, anchors=None):
        document = torch.full((len(rows), tokens), -1)
        position = torch.zeros(len(rows), tokens, dtype=torch.int64)
        for b, lengths in enumerate(rows):
            begin = 0
            for number, length in enumerate(lengths):
                document[b, begin : begin + length] = number
                position[b, begin : begin + length] = torch.arange(length)
                begin += length
        loss_mask = (torch.rand(len(rows), tokens) < learned) & (document >= 0)
        sampler = AnchorSampler(seed=seed, slots=args.anchor_slots)
        drawn = sampler.draw(
            anchor_candidates(loss_mask, document), first_row=0, total_rows=len(rows)
        )
        return Batch(
            args=args,
            tokens=torch.randint(args.vocab_size - 1, (len(rows), tokens)),
            loss_mask=loss_mask,
            document=document,
            position=position,
            features=torch.randn(len(rows), tokens, args.feature_dim),
            anchors=drawn if anchors is None else anchors,
        )

    return make
