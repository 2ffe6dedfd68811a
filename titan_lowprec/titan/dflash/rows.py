"""Rows to store: documents as the loader packs them, or prompts with the target's own answers."""

import hashlib
from collections.abc import Collection
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist
from tqdm import tqdm

from titan_lowprec.data.loader import PackedLoader
from titan_lowprec.models.dflash.feature_loader import collate
from titan_lowprec.models.dflash.feature_writer import FeatureWriter, finish_index
from titan_lowprec.models.dflash.features import (
    DTYPES,
    FeatureIdentity,
    FeatureIndex,
    FeatureRecord,
)
from titan_lowprec.shapes import Int, Int64, Tensor
from titan_lowprec.titan.dflash.batch import learned_tokens
from titan_lowprec.titan.dflash.generate import greedy_answers
from titan_lowprec.titan.dflash.target import FrozenTarget
from titan_lowprec.titan.loss import Batch


@dataclass(frozen=True)
class Answers:
    """Replace documents by their beginnings and what the target says next, greedily."""

    prompt_tokens: int
    answer_tokens: int

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.answer_tokens < 2:
            raise ValueError(
                f"Answers: prompts must have at least 1 token and answers 2, got "
                f"{self.prompt_tokens} and {self.answer_tokens}"
            )


def document_rows(batch: Batch) -> list[FeatureRecord]:
    """Packed rows as they are, without features."""
    inputs, labels = batch
    mask = learned_tokens(labels, inputs["document_ids"])
    return [
        FeatureRecord(tokens, learned, document, torch.zeros(len(tokens), 0))
        for tokens, learned, document in zip(
            inputs["input"], mask, inputs["document_ids"].int(), strict=True
        )
    ]


def answer_rows(
    batch: Batch, target: FrozenTarget, answers: Answers, *, eos_ids: Collection[int]
) -> list[FeatureRecord]:
    """Rows of prompts and answers; only answers are to be learned.

    A row has as many prompts as fit with their answers; each is the beginning of a stretch of the
    packed row that lies in one document.

    Raises:
        ValueError: Not one prompt fits.
    """
    inputs, _ = batch
    S, P = inputs["input"].shape[1], answers.prompt_tokens
    stretch = P + answers.answer_tokens
    begins = range(0, S - stretch + 1, stretch)
    if not begins:
        raise ValueError(
            f"answer_rows: prompt and answer must fit a row of {S} tokens, got {stretch}; shorten "
            "them or raise training.seq_len"
        )
    prompts = [
        (row, inputs["input"][row, begin : begin + P])
        for row in range(len(inputs["input"]))
        for begin in begins
        if _in_one_document(inputs["document_ids"][row, begin : begin + P])
    ]
    device = target.tables.embed_VE.device
    stacked = torch.stack([prompt for _, prompt in prompts]).to(device)
    given = greedy_answers(
        target, stacked, answer_tokens=answers.answer_tokens, eos_ids=eos_ids
    ).cpu()
    rows: dict[int, list[Tensor]] = {}
    for (row, prompt), answer in zip(prompts, given, strict=True):
        rows.setdefault(row, []).append(torch.cat((prompt, _until(answer, eos_ids))))
    return [_packed(documents, prompt_tokens=P) for documents in rows.values()]


def _in_one_document(document_P: Int[Tensor, " P"]) -> bool:
    return int(document_P[0]) >= 0 and bool((document_P == document_P[0]).all())


def _until(answer_A: Int64[Tensor, " A"], eos_ids: Collection[int]) -> Tensor:
    ends = [i for i, token in enumerate(answer_A.tolist()) if token in eos_ids]
    return answer_A[: ends[0] + 1] if ends else answer_A


def _packed(documents: list[Tensor], *, prompt_tokens: int) -> FeatureRecord:
    lengths = torch.tensor([len(tokens) for tokens in documents])
    inside = torch.cat([torch.arange(int(n)) for n in lengths])
    number = torch.arange(len(documents), dtype=torch.int32)
    tokens = torch.cat(documents)
    return FeatureRecord(
        input_ids_S=tokens,
        loss_mask_S=inside >= prompt_tokens,
        document_S=torch.repeat_interleave(number, lengths),
        features_SO=torch.zeros(len(tokens), 0),
    )


def with_features(
    rows: list[FeatureRecord], target: FrozenTarget, *, dtype: torch.dtype
) -> list[FeatureRecord]:
    """The same rows with the target's taps."""
    longest = max(len(row.input_ids_S) for row in rows)
    documents = max(int(row.document_S.max()) + 1 for row in rows)
    inputs, _ = collate(rows, row_tokens=longest, max_documents=documents)
    device = target.tables.embed_VE.device
    features_BSO = target.features(
        inputs["input"].to(device),
        position_BS=inputs["positions"].to(device),
        cu_seqlens_BM=inputs["cu_seqlens"].to(device),
    )
    return [
        FeatureRecord(row.input_ids_S, row.loss_mask_S, row.document_S, f[: len(row.input_ids_S)])
        for row, f in zip(rows, features_BSO.to("cpu", dtype), strict=True)
    ]


def write_rows(
    loader: PackedLoader,
    target: FrozenTarget,
    identity: FeatureIdentity,
    folder: Path,
    *,
    answers: Answers | None,
    batches: int | None,
    shard_batches: int,
) -> FeatureIndex | None:
    """Store a rank's rows, continuing after complete files, and join all ranks' index at the end.

    Args:
        loader: Of this rank, at its beginning; without ``repeat``.
        target: Answers, and computes features if ``identity`` has taps.
        identity: Of the features.
        folder: Where to.
        answers: ``None`` for the documents as they are.
        batches: Of every rank; ``None`` for all there are.
        shard_batches: Batches of one file.

    Returns:
        The index on rank 0, ``None`` elsewhere.
    """
    plan = f"{loader.dataset.plan} {asdict(answers) if answers else None} {loader.batch_rows}"
    writer = FeatureWriter(
        folder,
        identity,
        source=hashlib.sha256(plan.encode()).hexdigest()[:16],
        rank=loader.rank,
        per_shard=shard_batches,
    )
    done = writer.batches
    total = None if batches is None else batches - done
    left = islice(loader, done, batches)
    for batch in tqdm(left, desc="batches", total=total, disable=loader.rank != 0):
        rows = document_rows(batch)
        if answers is not None:
            rows = answer_rows(batch, target, answers, eos_ids=identity.eos_ids)
        if identity.tap_layers:
            rows = with_features(rows, target, dtype=DTYPES[identity.dtype])
        writer.add_batch(rows)
    writer.close()
    if dist.is_initialized():
        dist.barrier()
    return finish_index(folder, identity, ranks=loader.world_size) if loader.rank == 0 else None
