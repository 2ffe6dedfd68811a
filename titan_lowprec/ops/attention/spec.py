"""What an attention call computes: one frozen value that names every contested choice."""

import math
from dataclasses import dataclass, field, fields, replace
from typing import Literal, get_args

from titan_lowprec.formats.catalogue import E4M3FN

Recipe = Literal["fp32", "bf16", "mxfp8", "nvfp4_mixed", "nvfp4_full"]
Mask = Literal["causal", "full"]
OperandScales = Literal["token_block", "token"]
Fold = Literal["block_scaled", "hopper"]
GradientGroups = Literal["tile", "line"]
RowSum = Literal["unrounded", "rounded"]
DvExponent = Literal["tile", "fixed"]
DqAccumulation = Literal["fp32", "fp16_boost"]
DeltaGradient = Literal["as_in_dp", "unquantised_fault"]

FIXED_DV_EXPONENT = 8
"""Power of two before the e4m3 cast of P in dV under ``dv_exponent="fixed"`` (the paper's)."""

_CHOICES = {
    "recipe": Recipe,
    "mask": Mask,
    "scales": OperandScales,
    "fold": Fold,
    "gradient_groups": GradientGroups,
    "row_sum": RowSum,
    "dv_exponent": DvExponent,
    "dq_accum": DqAccumulation,
    "delta_gradient": DeltaGradient,
}


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """Every numerical choice of one attention call; hashable, checked when it is built.

    Start from a named constructor and change fields with ``dataclasses.replace``.

    Numerics:
        ``README.md`` beside this file states the formulas that the fields select.

    Source:
        arXiv:2611.03344, sections 3.1-3.6 and appendices A.4, B.1.
    """

    recipe: Recipe
    mask: Mask
    scales: OperandScales
    """Tokens that share the exponent of Q, K, V and G: 32 of one document, or one (strict)."""
    fold: Fold
    """Where token exponents enter a product over tokens: the MMA's block scales, or the other
    operand before its cast."""
    gradient_groups: GradientGroups
    """Elements of P and dS that share an exponent in the gradient products. ``tile``: 32 queries
    x 32 keys (dQ under ``scales="token"``: one query x 32 keys). ``line``: one query x ``tile_k``
    keys for dQ, one key x ``tile_q`` queries for dK and dV."""
    tile_q: int
    """Queries of a tile, counted from the start of the document; a multiple of 32."""
    tile_k: int
    """Keys of a tile, counted from the start of the document; a multiple of 32."""
    weight_exponent: int
    """c: a softmax weight is multiplied by ``2**c`` before its cast."""
    max_lag: int
    """tau: how far, in base-2 units, a row's reference may lag its true running maximum."""
    row_sum: RowSum
    """Whether O is normalised by the sum of the weights before or after their cast. The LSE is
    that of the unrounded weights in both cases."""
    dv_exponent: DvExponent
    """Exponent of P in dV: from the group's maximum, or the fixed ``2**8``."""
    dq_accum: DqAccumulation
    rotate: bool
    """Hadamard rotation of Q and K over the head dimension (a power of two)."""
    output_residual: bool
    """Save the low part of a bf16 output, so that D comes from about 16 bits of O."""
    delta_gradient: DeltaGradient
    """G in D = rowsum(G * O). ``as_in_dp``: the representation that dP uses. ``unquantised_fault``:
    a fault, for the ablation: D from G as it came, dP from its codes, so that the rows of dS no
    longer sum to zero."""
    centring: bool
    """Study: D from the backward's own P and E, divided by the row sum of P."""
    deterministic: bool
    """Equal inputs give equal bits. The reference always is; kernels may be faster without."""
    text: str = field(init=False, repr=False, compare=False)
    """The other fields in one line. Written once: in compiled code a second specification would
    turn the integers symbolic, which a string cannot be formatted from."""

    @classmethod
    def bf16(cls, *, mask: Mask) -> "AttentionSpec":
        """The baseline: bf16 operands, fp32 accumulation."""
        return cls(
            recipe="bf16",
            mask=mask,
            scales="token",
            fold="block_scaled",
            gradient_groups="tile",
            tile_q=64,
            tile_k=64,
            weight_exponent=0,
            max_lag=0,
            row_sum="unrounded",
            dv_exponent="tile",
            dq_accum="fp32",
            rotate=False,
            output_residual=False,
            delta_gradient="as_in_dp",
            centring=False,
            deterministic=True,
        )

    @classmethod
    def fp32(cls, *, mask: Mask) -> "AttentionSpec":
        """Nothing is rounded below fp32: the exact attention of an evaluation; reference only."""
        return replace(cls.bf16(mask=mask), recipe="fp32")

    @classmethod
    def mxfp8(cls, *, mask: Mask) -> "AttentionSpec":
        """E4M3 everywhere, token-block exponents outside the products, exact running maximum."""
        return cls(
            recipe="mxfp8",
            mask=mask,
            scales="token_block",
            fold="hopper",
            gradient_groups="line",
            tile_q=64,
            tile_k=64,
            weight_exponent=8,
            max_lag=0,
            row_sum="unrounded",
            dv_exponent="tile",
            dq_accum="fp32",
            rotate=True,
            output_residual=False,
            delta_gradient="as_in_dp",
            centring=False,
            deterministic=True,
        )

    @classmethod
    def nvfp4_mixed(cls, *, mask: Mask) -> "AttentionSpec":
        """Scores from NVFP4 Q and K; every other product as in ``mxfp8``."""
        return replace(cls.mxfp8(mask=mask), recipe="nvfp4_mixed")

    @classmethod
    def nvfp4_full(cls, *, mask: Mask) -> "AttentionSpec":
        """Every product in 4 bits; reference only, for the ablation."""
        return replace(cls.mxfp8(mask=mask), recipe="nvfp4_full")

    @property
    def quantised(self) -> bool:
        """Whether operands are stored as codes."""
        return self.recipe not in ("fp32", "bf16")

    @property
    def query_group(self) -> int:
        """Queries that share an exponent of dS in dQ."""
        return 1 if self.gradient_groups == "line" or self.scales == "token" else 32

    def __post_init__(self) -> None:
        for name, choice in _CHOICES.items():
            if getattr(self, name) not in get_args(choice):
                raise ValueError(
                    f"AttentionSpec: {name} must be one of {get_args(choice)}, "
                    f"got {getattr(self, name)!r}"
                )
        for name in ("tile_q", "tile_k"):
            size = getattr(self, name)
            if size <= 0 or size % 32 != 0:
                raise ValueError(
                    f"AttentionSpec: {name} must be a positive multiple of 32, got {size}; "
                    "blocks of 32 tokens must not straddle tiles"
                )
        _check_range(self)
        _check_combination(self)
        text = ";".join(f"{name}={getattr(self, name)}" for name in _FIELDS)
        object.__setattr__(self, "text", text)

    def encode(self) -> str:
        """One line of text that ``decode`` reads back; what the custom ops carry."""
        return self.text

    @classmethod
    def decode(cls, text: str) -> "AttentionSpec":
        """The specification that ``encode`` wrote."""
        values: dict[str, str] = dict(item.split("=", 1) for item in text.split(";"))
        if set(values) != set(_FIELDS):
            raise ValueError(
                f"AttentionSpec.decode: fields must be {_FIELDS}, got {tuple(values)}; "
                "pass what encode() returned"
            )
        return cls(**{name: _PARSE[_TYPES[name]](value) for name, value in values.items()})  # pyright: ignore[reportArgumentType]


_TYPES = {
    option.name: option.type if option.type in (int, bool) else str
    for option in fields(AttentionSpec)
    if option.init
}
_FIELDS = tuple(_TYPES)
_PARSE = {int: int, bool: lambda text: {"True": True, "False": False}[text], str: str}


def _check_range(spec: AttentionSpec) -> None:
    """Weights reach ``2**(c + tau)``, which must not saturate E4M3."""
    limit = math.log2(E4M3FN.max_value)
    c, tau = spec.weight_exponent, spec.max_lag
    if c < 0 or tau < 0 or c + tau > limit:
        raise ValueError(
            "AttentionSpec: weight_exponent + max_lag must be at most "
            f"log2({E4M3FN.max_value:g}) = {limit:.2f} and neither negative, got {c} + {tau}; "
            "a larger weight saturates silently"
        )


def _check_combination(spec: AttentionSpec) -> None:
    """Refuse choices that contradict one another or that nothing implements."""
    wrong: list[str] = []
    if not spec.quantised:
        fixed = {"scales": "token", "fold": "block_scaled", "gradient_groups": "tile"}
        fixed |= {"weight_exponent": 0, "dv_exponent": "tile", "rotate": False}
        fixed |= {"delta_gradient": "as_in_dp"}
        wrong += [
            f"recipe={spec.recipe!r} quantises nothing: {name} must be {value!r}, "
            f"got {getattr(spec, name)!r}"
            for name, value in fixed.items()
            if getattr(spec, name) != value
        ]
    elif spec.fold == "hopper" and spec.dv_exponent == "fixed":
        wrong.append(
            "dv_exponent='fixed' has no reference for the folded exponent of G: "
            "use fold='block_scaled' or dv_exponent='tile'"
        )
    elif spec.fold == "hopper" and spec.row_sum == "rounded":
        wrong.append(
            "row_sum='rounded' would drop a heavy key with a small V, whose folded weight rounds "
            "to zero: use fold='block_scaled' or row_sum='unrounded'"
        )
    elif spec.fold == "block_scaled" and spec.gradient_groups == "line":
        wrong.append(
            "fold='block_scaled' uses one set of dS codes for dQ and dK: "
            "use gradient_groups='tile' or fold='hopper'"
        )
    if spec.recipe == "nvfp4_full" and (spec.dv_exponent, spec.dq_accum) != ("tile", "fp32"):
        wrong.append(
            "recipe='nvfp4_full' has its own 4-bit scale rules: "
            "use dv_exponent='tile' and dq_accum='fp32'"
        )
    if spec.centring and spec.delta_gradient != "as_in_dp":
        wrong.append(
            "centring takes D from P and dP, where no G is left to choose: "
            "use delta_gradient='as_in_dp' or centring=False"
        )
    if wrong:
        raise ValueError("AttentionSpec: " + "; ".join(wrong))
