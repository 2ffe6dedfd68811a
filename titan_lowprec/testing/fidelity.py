"""How close an attention specification comes to float64, in more than a cosine."""

from dataclasses import dataclass

import torch

from titan_lowprec.diagnostics.attention_stats import GradientStatistics, gradient_statistics
from titan_lowprec.diagnostics.causal_leak import attention_results
from titan_lowprec.ops.attention.api import Impl
from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.testing.accuracy import (
    AttentionTruth,
    attention_truth,
    cosine,
    relative_l2,
    row_gain_error,
)
from titan_lowprec.testing.cases import PackedInputs


@dataclass(frozen=True, slots=True)
class Fidelity:
    """Errors of one call against float64; keys are ``out``, ``dq``, ``dk`` and ``dv``."""

    cosine: dict[str, float]
    relative_l2: dict[str, float]
    row_gain_rms: float
    """RMS over output rows of ``<o, o_ref> / <o_ref, o_ref> - 1``."""
    statistics: GradientStatistics


def input_truth(inputs: PackedInputs, spec: AttentionSpec) -> AttentionTruth:
    """Attention of the inputs in float64 under the specification's mask."""
    return attention_truth(*inputs.tensors(), inputs.cu_seqlens_RM, mask=spec.mask)


def measure_fidelity(
    inputs: PackedInputs, *, truth: AttentionTruth, spec: AttentionSpec, impl: Impl
) -> Fidelity:
    """Run one call and compare it with its float64 truth."""
    out, _, dq, dk, dv = attention_results(
        *inputs.tensors(), inputs.cu_seqlens_RM, spec=spec, impl=impl
    )
    actual = {"out": out, "dq": dq, "dk": dk, "dv": dv}
    gains = row_gain_error(out, truth.out_NHD)
    gains = gains[torch.isfinite(truth.lse_NH)]
    return Fidelity(
        cosine={name: cosine(actual[name], exact) for name, exact in truth.named().items()},
        relative_l2={
            name: relative_l2(actual[name], exact) for name, exact in truth.named().items()
        },
        row_gain_rms=float(gains.square().mean().sqrt()),
        statistics=gradient_statistics(*inputs.tensors(), inputs.cu_seqlens_RM, spec=spec),
    )
