"""Attention specifications that tests sweep: every recipe, every option at least once."""

import dataclasses

from titan_lowprec.ops.attention.spec import AttentionSpec, Mask

change = dataclasses.replace


def named_specs(mask: Mask) -> dict[str, AttentionSpec]:
    """One specification a name: every recipe, and every option at least once."""
    mxfp8, mixed = AttentionSpec.mxfp8(mask=mask), AttentionSpec.nvfp4_mixed(mask=mask)
    blocks = {"fold": "block_scaled", "gradient_groups": "tile"}
    return {
        "fp32": AttentionSpec.fp32(mask=mask),
        "bf16": AttentionSpec.bf16(mask=mask),
        "bf16-residual": change(AttentionSpec.bf16(mask=mask), output_residual=True),
        "mxfp8": mxfp8,
        "mxfp8-block_scaled": change(mxfp8, **blocks),
        "mxfp8-strict": change(mxfp8, scales="token", dq_accum="fp16_boost"),
        "mxfp8-strict-block_scaled": change(mxfp8, scales="token", dq_accum="fp16_boost", **blocks),
        "mxfp8-tiles": change(mxfp8, gradient_groups="tile", tile_q=128, tile_k=32),
        "mxfp8-lagging": change(mxfp8, weight_exponent=4, max_lag=4, rotate=False),
        "mxfp8-boost": change(mxfp8, dq_accum="fp16_boost", tile_q=32, tile_k=96),
        "mxfp8-centred": change(mxfp8, centring=True, output_residual=True),
        "mxfp8-fault": change(mxfp8, delta_gradient="unquantised_fault"),
        "mxfp8-paper": change(
            mxfp8, weight_exponent=4, max_lag=4, dv_exponent="fixed", row_sum="rounded", **blocks
        ),
        "nvfp4_mixed": mixed,
        "nvfp4_mixed-strict": change(mixed, scales="token", dq_accum="fp16_boost"),
        "nvfp4_mixed-block_scaled": change(mixed, **blocks),
        "nvfp4_full": AttentionSpec.nvfp4_full(mask=mask),
        "nvfp4_full-strict": change(AttentionSpec.nvfp4_full(mask=mask), scales="token"),
    }


CAUSAL = named_specs("causal")
STRICT = {name: spec for name, spec in CAUSAL.items() if spec.scales == "token"}
