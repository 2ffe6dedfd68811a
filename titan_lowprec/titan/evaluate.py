"""Uniform re-evaluation: any checkpoint on one validation set, under any attention."""

import copy
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import cast

import torch
from torchtitan.tools.logging import logger

from titan_lowprec.experiments.evaluation import LossResult
from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.titan.checkpoints import SavedRun, args_of, cast_parameters, load_model
from titan_lowprec.titan.dataloader import validation_batches_of
from titan_lowprec.titan.llama3.model import LowprecAttention, LowprecLlama
from titan_lowprec.titan.loss import IGNORE_INDEX, build_loss, loss_sum_of_batch
from titan_lowprec.titan.merged_config import MergedJobConfig
from titan_lowprec.titan.specs import AttentionPlan, attention_plan

NATIVE = "native"
"""The attention that the run trained with."""


def evaluate(
    run: SavedRun,
    attentions: Sequence[str],
    *,
    data: SavedRun,
    batches: int,
    device: torch.device,
) -> Iterator[LossResult]:
    """Evaluate one checkpoint.

    The loss is the fp32 cross-entropy without z-loss, whatever the run trained with.

    Args:
        run: Whose weights, and whose native attention.
        attentions: ``native`` or recipes of ``[attention]``; ``fp32`` is the exact reference.
        data: Whose ``[data]`` and ``[validation]`` name the rows, the same for all runs.
        batches: Validation batches; -1 is the whole set.
        device: Where.

    Raises:
        ValueError: The runs' tokenizers differ.
    """
    settings = evaluation_config(run, data, batches=batches)
    model = load_model(run, device=device, seq_len=settings.validation.seq_len)
    cast_parameters(model, run.config)
    for name in attentions:
        set_attention(model, plan_of(run.config, name, head_dim=args_of(model).head_dim))
        yield measure(model, settings, run=run, attention=name, device=device)


def evaluation_config(run: SavedRun, data: SavedRun, *, batches: int) -> MergedJobConfig:
    """The run's configuration over the common rows, with the common loss."""
    if run.config.data.tokenizer != data.config.data.tokenizer:
        raise ValueError(
            f"{run.folder}: must use the tokenizer of {data.folder}, {data.config.data.tokenizer}, "
            f"got {run.config.data.tokenizer}; losses per token of other tokens do not compare"
        )
    settings = copy.deepcopy(run.config)
    settings.data = copy.deepcopy(data.config.data)
    settings.job.dump_folder = str(data.folder)  # where the token cache is, by default
    settings.validation = copy.deepcopy(data.config.validation)
    settings.validation.steps = batches
    settings.training.seq_len = settings.validation.seq_len
    settings.loss = replace(run.config.loss, impl="logits_fp32", z_loss=0.0)
    return settings


def plan_of(config: MergedJobConfig, name: str, *, head_dim: int) -> AttentionPlan:
    """The attention of all layers."""
    if name == NATIVE:
        return attention_plan(config, head_dim=head_dim)
    changed = copy.copy(config)
    changed.attention = replace(
        config.attention, recipe=name, impl="auto", high_precision_layers=[]
    )
    return attention_plan(changed, head_dim=head_dim)


def set_attention(model: LowprecLlama, plan: AttentionPlan) -> None:
    """Give every layer its part of a plan."""
    for name, layer in model.layers.items():
        attention = cast(LowprecAttention, layer.attention)
        attention.spec, attention.impl = AttentionSpec.decode(plan.layer_spec(int(name))), plan.impl


@torch.no_grad()
def measure(
    model: LowprecLlama,
    settings: MergedJobConfig,
    *,
    run: SavedRun,
    attention: str,
    device: torch.device,
) -> LossResult:
    """Summed loss and tokens of every validation batch."""
    loss_fn = build_loss(settings)
    sums: list[float] = []
    tokens: list[int] = []
    for inputs, labels in validation_batches_of(settings, rank=0, world_size=1):
        on_device = {name: tensor.to(device) for name, tensor in inputs.items()}
        loss_sum = loss_sum_of_batch(model, loss_fn, on_device, labels.to(device), settings)
        sums.append(loss_sum.item())
        tokens.append(int((labels != IGNORE_INDEX).sum()))
    logger.info(f"{run.name} step {run.step}, {attention}: {sum(sums) / max(sum(tokens), 1):.5f}")
    return LossResult(run.name, run.step, attention, tuple(sums), tuple(tokens))
