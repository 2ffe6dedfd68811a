"""What the reference and the kernels of attention share: layouts, constants, document tables."""

import math
from dataclasses import dataclass

import torch

from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.shapes import Float, Tensor

LOG2_E = math.log2(math.e)


@dataclass(frozen=True, slots=True)
class Saved:
    """What one forward hands to its backward, in the order in which the custom op returns it.

    Both implementations read and write this layout, so the forward of one can be followed by the
    backward of the other. A slot that a recipe does not use is an empty tensor of shape ``(0,)``.

    ==============  =====================  ===========================  ===========================
    slot            bf16                   mxfp8                        nvfp4_mixed
    ==============  =====================  ===========================  ===========================
    ``out_NHD``     output, the inputs' dtype; zero in the tail
    ``lse2_NH``     fp32, log2 of the row sum of exp2(t); +inf in the tail
    ``out_low``     bf16 ``(N, H, D)`` if ``output_residual`` and a bf16 output, else empty
    ``q_codes``     bf16 ``(N, H, D)``     float8_e4m3fn ``(N, H, D)``  as mxfp8
    ``q_scale``     empty uint8            uint8 ``(N, H)``             as mxfp8
    ``k_codes``     bf16 ``(N, J, D)``     float8_e4m3fn ``(N, J, D)``  as mxfp8
    ``k_scale``     empty uint8            uint8 ``(N, J)``             as mxfp8
    ``v_codes``     bf16 ``(N, J, D)``     float8_e4m3fn ``(N, J, D)``  as mxfp8
    ``v_scale``     empty uint8            uint8 ``(N, J)``             as mxfp8
    ``q4_codes``    empty uint8            empty uint8                  uint8 ``(N, H, D // 2)``
    ``q4_scale``    empty uint8            empty uint8                  uint8 ``(N, H, D // 16)``
    ``k4_codes``    empty uint8            empty uint8                  uint8 ``(N, J, D // 2)``
    ``k4_scale``    empty uint8            empty uint8                  uint8 ``(N, J, D // 16)``
    ==============  =====================  ===========================  ===========================

    ``fp32`` is as bf16, in fp32. Codes of Q and K are those of the rotated vectors when ``rotate``
    is set. Scale bytes are biased exponents, one a token and head (the tokens of a block carry
    equal bytes). The 4-bit
    scales are E4M3 bits seen as bytes, the 4-bit codes two a byte, low nibble first. Under
    ``nvfp4_full`` the three code slots hold the (rotated) values in fp32: its copies along
    tokens are made where they are used, as no kernel shares them.
    """

    out_NHD: Float[Tensor, "N H D"]
    lse2_NH: Float[Tensor, "N H"]
    out_low: Tensor
    q_codes: Tensor
    q_scale: Tensor
    k_codes: Tensor
    k_scale: Tensor
    v_codes: Tensor
    v_scale: Tensor
    q4_codes: Tensor
    q4_scale: Tensor
    k4_codes: Tensor
    k4_scale: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """The slots in order."""
        return tuple(getattr(self, name) for name in SAVED_SLOTS)


SAVED_SLOTS = tuple(Saved.__dataclass_fields__)


@dataclass(frozen=True, slots=True)
class Gradients:
    """Gradients of the three inputs, in the inputs' dtype; zero in the tail."""

    dq_NHD: Float[Tensor, "N H D"]
    dk_NJD: Float[Tensor, "N J D"]
    dv_NJD: Float[Tensor, "N J D"]


def operand_dtype(spec: AttentionSpec) -> torch.dtype:
    """Type of Q, K and V in a product of a recipe without codes."""
    return torch.float32 if spec.recipe == "fp32" else torch.bfloat16


def empty_slot(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The placeholder of a slot that a recipe does not use."""
    return torch.empty(0, dtype=dtype, device=device)


def score_factor(head_dim: int) -> float:
    """Factor from a product of decoded Q and K to base-2 scores: ``head_dim**-0.5 * log2(e)``."""
    return head_dim**-0.5 * LOG2_E
