"""Health of every attention layer during training: ``quantisation/*`` and ``causality/*``.

Every ``metrics.health_every`` steps a hook sees each layer's input in the first microbatch,
computes a slice of its Q, K and V again and measures it aside. It draws no random number of the
training and writes nothing that the training reads. On other steps there is no hook.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn as nn

from titan_lowprec.diagnostics.attention_health import AttentionHealth, attention_health
from titan_lowprec.shapes import Tensor
from titan_lowprec.titan.llama3.model import LowprecAttention
from titan_lowprec.titan.llama3.rotary import rotate

SLICE_TOKENS = 256
"""Tokens of the first row that are measured; a causal prefix, so it is attention of its own."""
LARGEST = "largest"


class HealthProbe:
    """Figures of steps that are due.

    Args:
        owner: Holds ``model_parts`` once the trainer has built them.
        every: Steps between measurements; 0 is never.
    """

    def __init__(self, owner: Any, *, every: int) -> None:
        self.owner, self.every = owner, every
        self._figures: dict[int, dict[str, AttentionHealth]] = {}

    @contextmanager
    def watching(self, step: int) -> Iterator[None]:
        """Measure during the forward inside, if ``step`` is due and was not measured yet."""
        if self.every == 0 or step % self.every != 0 or step in self._figures:
            yield
            return
        layers = self._figures[step] = {}
        hooks = [
            layer.register_forward_pre_hook(measuring_hook(layers, name), with_kwargs=True)
            for part in self.owner.model_parts or ()
            for name, layer in layers_of(part)
        ]
        try:
            yield
        finally:
            for handle in hooks:
                handle.remove()

    def take(self, step: int) -> dict[str, float]:
        """The figures of a step, by metric key, once; none if it was not measured."""
        return metric_keys(self._figures.pop(step, {}))


def measuring_hook(figures: dict[str, AttentionHealth], name: str) -> Callable[..., None]:
    """A forward pre-hook that measures its block into ``figures``."""

    def measure(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if name not in figures:  # a checkpointed block may run again in the backward
            figures[name] = layer_health(layer, *args, **kwargs)

    return measure


def layers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Blocks with our attention, in whatever wrappers of compile and checkpointing they are."""
    blocks: Any = getattr(model, "layers", nn.ModuleDict())
    return [
        (name, block)
        for name, block in blocks.items()
        if isinstance(getattr(block, "attention", None), LowprecAttention)
    ]


@torch.no_grad()
def layer_health(
    layer: Any,
    hidden: Tensor,
    freqs_cis: Tensor,
    attention_masks: Tensor,
) -> AttentionHealth:
    """Measure a block from the arguments of its forward; one KV head and its query heads."""
    attention: LowprecAttention = layer.attention
    T, D = min(hidden.shape[1], SLICE_TOKENS), attention.head_dim
    x = layer.attention_norm(hidden[:1, :T].detach())
    q, k, v = (w(x).view(1, T, -1, D) for w in (attention.wq, attention.wk, attention.wv))
    q, k = rotate(q, freqs_cis[:1, :T]), rotate(k, freqs_cis[:1, :T])
    group = q.shape[2] // k.shape[2]
    return attention_health(
        q[0, :, :group].contiguous(),
        k[0, :, :1].contiguous(),
        v[0, :, :1].contiguous(),
        attention_masks[0].clamp(max=T),
        spec=attention.spec,
        impl=attention.impl,
    )


def metric_keys(figures: dict[str, AttentionHealth]) -> dict[str, float]:
    """``quantisation/output_error/layer0``, ..., and ``.../largest`` over layers and operands."""
    metrics: dict[str, float] = {}
    for name, health in figures.items():
        for metric, value in layer_figures(health):
            family, _, operand = metric.partition(".")
            metrics[f"{family}/layer{name}{operand and '.'}{operand}"] = value
            if family != "quantisation/exponent_median":
                key = f"{family}/{LARGEST}"
                metrics[key] = larger(value, metrics.get(key, value))
    return metrics


def larger(left: float, right: float) -> float:
    """The larger of two numbers, NaN if one is."""
    return left if left > right or left != left else right


def layer_figures(health: AttentionHealth) -> Iterator[tuple[str, float]]:
    """A layer's figures; those of an operand end in ``.q``, ``.k`` or ``.v``."""
    yield "quantisation/output_error", health.output_error
    if health.ds_flushed is not None:
        yield "quantisation/ds_flushed", health.ds_flushed
    if health.ds_row_sum is not None:
        yield "quantisation/ds_row_sum", health.ds_row_sum
    for operand, codes in health.codes.items():
        yield f"quantisation/at_maximum.{operand}", codes.at_maximum
        yield f"quantisation/flushed.{operand}", codes.flushed
        yield f"quantisation/exponent_median.{operand}", codes.exponent_median
        yield f"quantisation/exponent_range.{operand}", codes.exponent_range
    if health.leak is not None:
        yield "causality/leaking_rows", float(health.leak.leaking_rows)
        yield "causality/rows_outside_block", float(health.leak.rows_outside_block)
        yield "causality/relative_change", health.leak.relative_change
        yield "causality/natural_change", health.leak.natural_change
        yield "causality/noise", float(health.leak.noise)
