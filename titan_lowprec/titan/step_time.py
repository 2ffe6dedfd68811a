"""How long a step takes on many GPUs: a model of measured parts, written out.

One step is ``A`` microbatches, then the optimizer:

    step = A (compute + sharding + exposed) + update / shards + fixed

``sharding`` is what FSDP2 adds to the compute where there are shards. ``exposed`` is what it
cannot hide of a microbatch's communication: the first gather and the last reduction (both of the
embedding, the model's first group), and whatever the collectives take beyond the compute they run
beside. A ring over ``s`` shards moves ``(s - 1) / s`` of the bytes through each GPU and passes
``s - 1`` hops; replicas add one all-reduce of a shard's gradients a step.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MeasuredParts:
    """What was timed; seconds and bytes a second."""

    compute_s: float
    """Forward and backward of one microbatch on one GPU, without communication."""
    sharding_s: float
    """What FSDP2 adds to it on several GPUs beyond exposed communication: copies into and out of
    its buffers, and kernels that run beside collectives."""
    update_s: float
    """Gradient norm and optimizer on one GPU that holds all parameters."""
    fixed_s: float
    """Host work, counts and data waiting of one step, whatever the number of GPUs."""
    link_rate: float
    """Bytes a second that a GPU sends in a large collective within a host."""
    network_rate: float
    """The same across hosts."""
    hop_s: float
    """Latency of one hop of a ring."""


@dataclass(frozen=True, slots=True)
class ShardedModel:
    """What FSDP2 moves: groups are the layers and the root group."""

    parameters: int
    first_group: int
    """Parameters of the group that is gathered first and reduced last."""
    groups: int
    gathers: int
    """Gathers of a microbatch: 2, or 1 where weights are kept for the backward
    (``fsdp_reshard_after_forward = "never"``)."""
    gather_bytes: int
    """Bytes of a gathered parameter."""
    reduce_bytes: int
    """Bytes of a reduced gradient."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """One row of the table."""

    gpus: int
    microbatches: int
    communication_s: float
    """Collectives of one microbatch, hidden or not."""
    exposed_s: float
    """The part of them that is not hidden."""
    step_s: float
    tokens_per_second: float
    efficiency: float
    """Tokens a second and GPU, over those of one GPU at the same tokens per step and GPU."""


def predict(
    parts: MeasuredParts,
    model: ShardedModel,
    *,
    gpus: int,
    shards: int,
    gpus_per_host: int,
    rows_per_step: int,
    rows_per_microbatch: int,
    tokens_per_row: int,
) -> Prediction:
    """Predict one step.

    Args:
        parts: Times of one GPU and rates of the links.
        model: What is sharded.
        gpus: All GPUs, data parallel alone.
        shards: GPUs that share one copy of the parameters; the rest are replicas.
        gpus_per_host: GPUs of one host, connected by the fast link.
        rows_per_step: Rows of the global batch.
        rows_per_microbatch: Rows of one GPU at a time.
        tokens_per_row: Sequence length.

    Raises:
        ValueError: The rows are no multiple of ``gpus * rows_per_microbatch``, or the GPUs none
            of ``shards``.
    """
    together = gpus * rows_per_microbatch
    if rows_per_step % together != 0:
        raise ValueError(
            f"predict: rows_per_step must be a multiple of gpus * rows_per_microbatch = {together}"
            f", got {rows_per_step}; raise the global batch or lower the local one"
        )
    if gpus % shards != 0:
        raise ValueError(f"predict: gpus must be a multiple of shards = {shards}, got {gpus}")
    microbatches = rows_per_step // together
    rate = parts.link_rate if shards <= gpus_per_host else parts.network_rate
    gathered, reduced = (
        float(width * model.parameters) for width in (model.gather_bytes, model.reduce_bytes)
    )
    gather = _collective_s(parts, gathered, shards, rate, model.groups)
    reduce = _collective_s(parts, reduced, shards, rate, model.groups)
    communication = model.gathers * gather + reduce
    first_and_last = (gather + reduce) * model.first_group / model.parameters
    exposed = first_and_last + max(0.0, communication - first_and_last - parts.compute_s)
    replicas = gpus // shards
    across = parts.link_rate if gpus <= gpus_per_host else parts.network_rate
    shard_bytes = reduced / shards
    # An all-reduce is a reduction and a gather.
    replicate = 2 * _collective_s(parts, shard_bytes, replicas, across, model.groups)
    sharding = parts.sharding_s if shards > 1 else 0.0
    busy = microbatches * (parts.compute_s + sharding + exposed)
    step = busy + replicate + parts.update_s / shards + parts.fixed_s
    alone = microbatches * parts.compute_s + parts.update_s + parts.fixed_s
    return Prediction(
        gpus=gpus,
        microbatches=microbatches,
        communication_s=communication,
        exposed_s=exposed,
        step_s=step,
        tokens_per_second=rows_per_step * tokens_per_row / step,
        efficiency=alone / step,
    )


def _collective_s(
    parts: MeasuredParts, total_bytes: float, ranks: int, rate: float, groups: int
) -> float:
    """Ring gather or reduction of ``total_bytes`` in ``groups`` calls."""
    if ranks == 1:
        return 0.0
    return total_bytes * (ranks - 1) / ranks / rate + groups * (ranks - 1) * parts.hop_s


def markdown_table(predictions: Sequence[Prediction]) -> str:
    """Predictions as a Markdown table."""
    lines = [
        "| GPUs | microbatches | communication | exposed | step | tokens/s | efficiency |",
        "|---|---|---|---|---|---|---|",
    ]
    for one in predictions:
        lines.append(
            f"| {one.gpus:,} | {one.microbatches} | {one.communication_s * 1e3:.1f} ms "
            f"| {one.exposed_s * 1e3:.1f} ms | {one.step_s * 1e3:,.0f} ms "
            f"| {one.tokens_per_second:,.0f} | {one.efficiency:.1%} |"
        )
    return "\n".join(lines)
