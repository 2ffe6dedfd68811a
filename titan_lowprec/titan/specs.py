"""From the ``[attention]`` section to the op's specification, layer by layer."""

from dataclasses import dataclass, field

import torch
from torchtitan.config import JobConfig
from torchtitan.tools.logging import logger

from titan_lowprec.ops.attention.api import Impl, resolve_impl
from titan_lowprec.ops.attention.spec import AttentionSpec


@dataclass
class AttentionPlan:
    """What each layer's attention does, in the form that logs and checkpoints can hold."""

    spec: str = ""
    """Encoded ``AttentionSpec`` of every layer that ``high_precision_layers`` does not name."""
    high_precision_spec: str = ""
    """Encoded specification of the layers that it names."""
    high_precision_layers: list[int] = field(default_factory=list)
    impl: Impl = "reference"

    def __post_init__(self) -> None:
        if not self.spec:
            self.spec = AttentionSpec.bf16(mask="causal").encode()
        if not self.high_precision_spec:
            self.high_precision_spec = AttentionSpec.bf16(mask="causal").encode()

    def layer_spec(self, layer_id: int) -> str:
        """The encoded specification of one layer."""
        high = layer_id in self.high_precision_layers
        return self.high_precision_spec if high else self.spec


def attention_spec(job_config: JobConfig) -> AttentionSpec:
    """The op's specification of the ``[attention]`` section.

    Raises:
        ValueError: The op cannot do what the section asks for.
    """
    section = job_config.attention
    return AttentionSpec(
        recipe=section.recipe,
        mask="causal",
        scales=section.scales,
        fold=section.fold,
        tile_q=section.tile_q,
        tile_k=section.tile_k,
        weight_exponent=section.weight_exponent,
        max_lag=section.max_lag,
        row_sum=section.row_sum,
        dv_exponent=section.dv_exponent,
        dq_accum=section.dq_accum,
        rotate=section.rotate and section.recipe != "bf16",
        output_residual=section.output_residual,
        centring=False,
        deterministic=section.deterministic,
    )


def attention_plan(job_config: JobConfig, *, head_dim: int) -> AttentionPlan:
    """Resolve recipe and implementation once, and say in the log what was chosen."""
    from torchtitan.tools.utils import device_type

    spec = attention_spec(job_config)
    section = job_config.attention
    impl = resolve_impl(
        section.impl, device=torch.device(device_type), spec=spec, head_dim=head_dim
    )
    logger.info(
        f"Attention recipe {spec.recipe}, scales {spec.scales}, fold {spec.fold}: "
        f"attention.impl={section.impl} resolved to {impl} on {device_type}"
    )
    return AttentionPlan(
        spec=spec.encode(),
        high_precision_layers=sorted(int(layer) for layer in section.high_precision_layers),
        impl=impl,
    )
