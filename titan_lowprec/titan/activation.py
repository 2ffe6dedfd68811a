"""Activation checkpointing: TorchTitan's modes, with a policy per op that knows our ops.

``mode`` none, full, memory_budget and every n-th layer are TorchTitan's. Under ``selective`` with
option ``op``, ``activation_checkpoint.save_ops`` says which results of a block are kept; everything
else is computed again in the backward. Attention is kept as what its own backward reads: output,
LSE, and for quantised recipes codes and scales, so that operands are quantised once and no bf16
Q, K or V is stored.
"""

from collections import Counter
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn as nn
import torchtitan.distributed.activation_checkpoint as stock_ac
from torch._C._dynamo import eval_frame  # pyright: ignore[reportMissingModuleSource]
from torch._higher_order_ops import inductor_compiled_code
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import (
    _disable_current_modes,  # pyright: ignore[reportPrivateUsage]
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry, register_flop_formula
from torchtitan.models.llama3.infra.parallelize import _op_sac_save_list
from torchtitan.tools.logging import logger

from titan_lowprec.ops.attention.api import SAVE_OPS as ATTENTION_SAVE_OPS
from titan_lowprec.ops.attention.common import SAVED_SLOTS
from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.ops.cross_entropy.api import SAVE_OPS as LOSS_SAVE_OPS
from titan_lowprec.titan.merged_config import MergedJobConfig

Op = Any
Policy = Callable[..., CheckpointPolicy]

aten = torch.ops.aten
ATTENTION = "attention"
ATTENTION_IF_SMALLER = "attention_if_smaller"
LINEARS = "linears"
HALF_LINEARS = "half_linears"

_LINEAR_OPS = frozenset({aten.mm.default, aten._scaled_mm.default})
_AMAX_OPS = frozenset({aten.max.default, aten.amax.default})
_COLLECTIVE_OPS = frozenset({torch.ops._c10d_functional.reduce_scatter_tensor.default})
_COMPILED: Op = inductor_compiled_code
_STOCK_ATTENTION: frozenset[Op] = frozenset(
    _op_sac_save_list - _LINEAR_OPS - _AMAX_OPS - _COLLECTIVE_OPS - {_COMPILED}
)
_ALWAYS = LOSS_SAVE_OPS | {_COMPILED}

NAMED_OPS: dict[str, frozenset[Op]] = {
    ATTENTION: ATTENTION_SAVE_OPS | _STOCK_ATTENTION,
    ATTENTION_IF_SMALLER: _STOCK_ATTENTION,
    LINEARS: _LINEAR_OPS,
    HALF_LINEARS: frozenset(),
    "amax": _AMAX_OPS,
    "collectives": _COLLECTIVE_OPS,
}
"""What a name in ``save_ops`` keeps; ``half_linears`` and ``attention_if_smaller`` decide call by
call."""
EXCLUSIVE = ((ATTENTION, ATTENTION_IF_SMALLER), (LINEARS, HALF_LINEARS))


def apply_activation_checkpointing(
    model: nn.Module, job_config: MergedJobConfig, *, compiled: bool
) -> None:
    """Wrap the blocks in ``model.layers`` as ``[activation_checkpoint]`` says.

    Args:
        model: Before compile and sharding.
        job_config: Checked.
        compiled: Whether the blocks will be compiled, which ``memory_budget`` needs.
    """
    section = job_config.activation_checkpoint
    if section.mode == "none":
        return
    if section.mode == "memory_budget":
        count_attention()
    if section.mode != "selective" or section.selective_ac_option != "op":
        stock_ac._layer_sac_count = 0  # process-global upstream: a second model would differ
        stock_ac.apply_ac(
            model,
            section,
            model_compile_enabled=compiled,
            base_folder=job_config.job.dump_folder,
        )
        return
    # as TorchTitan: of two graphs of a block, the older one is taken (pytorch#166926)
    eval_frame._set_lru_cache(False)  # pyright: ignore[reportAttributeAccessIssue]
    layers = model.get_submodule("layers")
    recomputed = forced_shapes(layers, section.per_op_sac_force_recompute_mm_shapes_by_fqns)
    for name, block in layers.named_children():
        wrapped = checkpoint_wrapper(
            block,
            context_fn=contexts_of(tuple(section.save_ops), recomputed),
            preserve_rng_state=section.preserve_rng_state,
            determinism_check=section.determinism_check,
            early_stop=section.early_stop,
            debug=section.debug,
        )
        layers.register_module(name, wrapped)
    logger.info(f"Applied activation checkpointing per op, saved: {', '.join(section.save_ops)}")


def count_attention() -> None:
    """Tell PyTorch's counter what the forward of attention costs, each row one causal document.

    ``memory_budget`` weighs bytes against counted FLOPs: an op without a count is recomputed first.
    """
    op = torch.ops.titan_lowprec.attention_forward
    if op in flop_registry:
        return

    @register_flop_formula(op)
    def _(q: Any, k: Any, v: Any, offsets: Any, *args: Any, **kwargs: Any) -> int:
        del k, v, args, kwargs
        tokens, heads, dim = q
        return 2 * tokens * (tokens // offsets[0]) * heads * dim


def contexts_of(
    names: tuple[str, ...], recomputed: frozenset[tuple[int, int]]
) -> Callable[[], Any]:
    """The ``context_fn`` of a checkpointed block.

    Args:
        names: Of ``save_ops``.
        recomputed: Shapes (in, out) of linear layers that are recomputed whatever ``names`` say.
    """
    saved = _ALWAYS.union(*(ops_of(name) for name in names))

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(_policy(saved, names, recomputed))

    return contexts


def _policy(
    saved: frozenset[Op], names: tuple[str, ...], recomputed: frozenset[tuple[int, int]]
) -> Policy:
    linears: Counter[bool] = Counter()

    def keeps(ctx: Any, op: Op, args: tuple[Any, ...]) -> bool:
        if op in _LINEAR_OPS:
            if tuple(args[1].shape) in recomputed:
                return False
            linears[ctx.is_recompute] += 1
            return op in saved or (HALF_LINEARS in names and linears[ctx.is_recompute] % 2 == 1)
        if op in ATTENTION_SAVE_OPS and ATTENTION_IF_SMALLER in names:
            q, k, _, _, spec, _ = args
            return saved_is_smaller(spec, heads=q.shape[1], kv_heads=k.shape[1], dim=q.shape[2])
        return op in saved

    def policy(ctx: Any, op: Op, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        del kwargs
        keep = keeps(ctx, op, args)
        return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE

    return policy


@lru_cache
def saved_is_smaller(spec: str, *, heads: int, kv_heads: int, dim: int) -> bool:
    """Whether attention's saved operands take at most the bytes of bf16 Q, K and V."""
    if not AttentionSpec.decode(spec).quantised:
        return True  # autograd refers to Q, K and V themselves
    N = 32
    with _disable_current_modes():  # this call is no part of what is being run or traced
        q, k = (
            torch.empty(N, n, dim, dtype=torch.bfloat16, device="meta") for n in (heads, kv_heads)
        )
        offsets = torch.empty(1, 2, dtype=torch.int32, device="meta")
        outputs = torch.ops.titan_lowprec.attention_forward(q, k, k, offsets, spec, "reference")
    operands = outputs[SAVED_SLOTS.index("q_codes") :]
    return sum(x.nbytes for x in operands) <= q.nbytes + 2 * k.nbytes


def ops_of(name: str) -> frozenset[Op]:
    """The ops that a name in ``save_ops`` keeps wherever they occur.

    Args:
        name: Of ``NAMED_OPS``, or of an op with namespace and overload.

    Raises:
        ValueError: No such op.
    """
    if name in NAMED_OPS:
        return NAMED_OPS[name]
    found: Any = torch.ops
    try:
        namespace, op, overload = name.split(".")
        for part in (namespace, op, overload):
            found = getattr(found, part)
    except (ValueError, AttributeError, RuntimeError):
        raise ValueError(
            f"activation_checkpoint.save_ops: must hold {sorted(NAMED_OPS)} or ops such as "
            f"'aten.silu.default', got {name!r}; correct it"
        ) from None
    return frozenset({found})


def forced_shapes(layers: nn.Module, fqns: list[str]) -> frozenset[tuple[int, int]]:
    """Shapes (in, out) of the linear layers whose names contain one of ``fqns``."""
    shapes: set[tuple[int, int]] = set()
    for name, module in layers.named_modules():
        if not any(fqn in f"layers.{name}" for fqn in fqns):
            continue
        if not isinstance(module, nn.Linear):
            raise ValueError(
                "activation_checkpoint.per_op_sac_force_recompute_mm_shapes_by_fqns: must name "
                f"linear layers, got layers.{name}, a {type(module).__name__}; name its children"
            )
        shapes.add((module.in_features, module.out_features))
    return frozenset(shapes)
