"""From the ``[attention]`` section to the op's specification, layer by layer."""

from dataclasses import dataclass, field, replace

import torch
from torchtitan.tools.logging import logger

from titan_lowprec.ops.attention.api import Impl, resolve_impl
from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.ops.cross_entropy.api import Impl as HeadImpl
from titan_lowprec.titan.merged_config import MergedJobConfig

COMMON_FIELDS = ("tile_q", "tile_k", "row_sum", "output_residual", "deterministic")
QUANTISED_FIELDS = (
    "scales",
    "fold",
    "gradient_groups",
    "weight_exponent",
    "max_lag",
    "dv_exponent",
    "dq_accum",
    "delta_gradient",
    "rotate",
)
"""Fields of ``[attention]`` that recipes without codes have no use for."""


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


def attention_spec(job_config: MergedJobConfig) -> AttentionSpec:
    """The op's specification of the ``[attention]`` section.

    Raises:
        ValueError: The op cannot do what the section asks for.
    """
    section = job_config.attention
    spec = getattr(AttentionSpec, section.recipe)(mask="causal")
    names = COMMON_FIELDS + (QUANTISED_FIELDS if spec.quantised else ())
    return replace(spec, **{name: getattr(section, name) for name in names})


def attention_plan(job_config: MergedJobConfig, *, head_dim: int) -> AttentionPlan:
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
    if spec.delta_gradient != "as_in_dp":
        logger.warning(
            f"attention.delta_gradient={spec.delta_gradient}: D and dP use different gradients, "
            "a fault on purpose; paths like this one have diverged"
        )
    return AttentionPlan(
        spec=spec.encode(),
        high_precision_layers=sorted(int(layer) for layer in section.high_precision_layers),
        impl=impl,
    )


def resolve_head_impl() -> HeadImpl:
    """The chunked head's implementation on this machine, said in the log."""
    from torchtitan.tools.utils import device_type

    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
    impl: HeadImpl = "triton" if hopper else "reference"
    logger.info(f"loss.impl=linear_chunked runs as {impl} on {device_type}")
    return impl
