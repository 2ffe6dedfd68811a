"""The panels of a loss dashboard, once for the local report and once for wandb."""

from dataclasses import dataclass
from typing import Literal

TOKENS = "valid_tokens_seen"
Axis = Literal["step", "valid_tokens_seen"]
Kind = Literal["train", "validation", "difference"]


@dataclass(frozen=True, slots=True)
class Panel:
    """One plot.

    ``local`` is a key of ``metrics.jsonl``; ``mirror`` are keys of wandb, of which one that ends
    with ``/`` stands for all that begin with it.
    """

    title: str
    axis: Axis
    local: str
    mirror: tuple[str, ...]
    unit: str
    kind: Kind = "train"


@dataclass(frozen=True, slots=True)
class Section:
    """Panels of one subject."""

    title: str
    panels: tuple[Panel, ...]
    note: str = ""
    """What a reader of the panels must know."""


def health(title: str, family: str, unit: str) -> Panel:
    """Largest figure over layers here, every layer in wandb; ``titan/health.py`` has the keys."""
    return Panel(title, "step", f"{family}/largest", (f"{family}/",), unit)


SHARE = "share of elements"
LOSS = ("loss_metrics/global_avg_loss",)
NATS = "nats per token"
SECTIONS: tuple[Section, ...] = (
    Section(
        "Loss",
        (
            Panel("Training loss by tokens", TOKENS, "loss", LOSS, NATS),
            Panel("Training loss by steps", "step", "loss", LOSS, NATS),
        ),
    ),
    Section(
        "Difference to the baseline",
        (
            Panel(
                "Training loss - baseline, equal seed and tokens",
                TOKENS,
                "loss",
                ("difference/loss",),
                NATS,
                "difference",
            ),
        ),
    ),
    Section(
        "Validation",
        (
            Panel(
                "Validation loss",
                TOKENS,
                "loss",
                ("validation_metrics/loss",),
                NATS,
                "validation",
            ),
        ),
    ),
    Section(
        "Gradient norm and learning rate",
        (
            Panel("Gradient norm before clipping", "step", "grad_norm", ("grad_norm",), "norm"),
            Panel("Learning rate", "step", "lr", ("lr",), "learning rate"),
        ),
    ),
    Section(
        "Throughput and MFU",
        (
            Panel(
                "Valid tokens per second, all devices",
                "step",
                "valid_tokens_per_s",
                ("throughput/valid_tokens_per_s",),
                "tokens/s",
            ),
            Panel("Model FLOPs utilisation", "step", "mfu", ("mfu(%)",), "share of peak"),
            Panel("Step time", "step", "step_time_s", ("time_metrics/end_to_end(s)",), "seconds"),
        ),
    ),
    Section(
        "Memory",
        (
            Panel(
                "Peak reserved memory", "step", "memory_gib", ("memory/max_reserved(GiB)",), "GiB"
            ),
            Panel(
                "Peak active memory",
                "step",
                "memory_active_gib",
                ("memory/max_active(GiB)",),
                "GiB",
            ),
        ),
    ),
    Section(
        "Quantisation health",
        (
            Panel("Skipped steps", "step", "skipped_steps", ("skipped_steps",), "steps"),
            health("Output error", "quantisation/output_error", "relative L2"),
            health("Flushed to zero in Q, K, V", "quantisation/flushed", SHARE),
            health("At the largest code in Q, K, V", "quantisation/at_maximum", SHARE),
            health("Range of scale exponents", "quantisation/exponent_range", "bits"),
            health("Flushed to zero in dS", "quantisation/ds_flushed", SHARE),
            health(
                "Row sums of dS, 0 in exact arithmetic",
                "quantisation/ds_row_sum",
                "share of magnitude",
            ),
        ),
        "Worst layer, on a slice of every layer's own operands, every metrics.health_every steps. "
        "Output error: to the exact (fp32) attention of the same operands. dS: under a gradient "
        "from N(0, 1).",
    ),
    Section(
        "Causality",
        (
            health("Earlier rows that a change reaches", "causality/leaking_rows", "rows"),
            health(
                "Of these before the change's 32-token block",
                "causality/rows_outside_block",
                "rows",
            ),
            health(
                "Largest change of an earlier row of O", "causality/relative_change", "relative L2"
            ),
            health(
                "The same, redrawn at the operands' own size",
                "causality/natural_change",
                "relative L2",
            ),
        ),
        "Worst layer. All tokens from the middle of a 32-token block on are redrawn at a size of "
        "1e6, and earlier rows of O, LSE and dQ are compared in bits. With one exponent per block "
        "(attention.scales = token_block), rows of that block may change; rows before it must not.",
    ),
    Section(
        "Data",
        (
            Panel(
                "Documents per row",
                "step",
                "documents_per_row",
                ("data/documents_per_row",),
                "documents",
            ),
            Panel(
                "Padding", "step", "padding_fraction", ("data/padding_fraction",), "share of row"
            ),
            Panel(
                "Waiting for data",
                "step",
                "data_wait_s",
                ("time_metrics/data_loading(s)",),
                "seconds",
            ),
        ),
    ),
)
