"""Mixed precision in one process that holds every parameter: FSDP2's numbers without its copies.

On a mesh of one, FSDP2 gathers and reduces with itself: it casts parameters, copies them into a
buffer and out of it, copies gradients into a buffer and into another, and adds them. Here a
parameter is cast into the tensor that computes, and its gradient into ``.grad``. Between passes
the model holds its parameters as DTensors over the mesh, as FSDP2's are: checkpoints, initial
weights, norms and optimizers do not see the difference.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
import torch.nn as nn
from torch.autograd import Variable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

Tensor = torch.Tensor
autograd: Any = torch.autograd
foreach_copy: Any = torch._foreach_copy_  # pyright: ignore[reportPrivateImportUsage]


def hold_whole(
    model: nn.Module,
    units: Mapping[nn.Module, bool],
    mesh: DeviceMesh,
    *,
    param_dtype: torch.dtype,
    reduce_dtype: torch.dtype,
) -> list["Unit"]:
    """Let modules compute in ``param_dtype`` while the model keeps its parameters.

    Args:
        model: After activation checkpointing and compile; may be on the meta device.
        units: Modules that own all its parameters, each cast as a whole when it runs; and whether
            its cast parameters are freed after the forward, to be cast again for the backward.
            After the backward they always are.
        mesh: Of size one.
        param_dtype: What units compute in.
        reduce_dtype: What a gradient is rounded to before it is added to those before it.

    Returns:
        The units, which the modules' hooks hold as well.

    Raises:
        ValueError: The mesh has several processes, or a parameter is in no unit or in two.
    """
    if mesh.size() != 1:
        raise ValueError(
            f"hold_whole: a mesh of one process is required, got {mesh.size()}; shard with FSDP2"
        )
    wholes = [
        Unit(module, param_dtype=param_dtype, reduce_dtype=reduce_dtype, frees=frees)
        for module, frees in units.items()
    ]
    held = [id(owner._parameters[name]) for whole in wholes for owner, name in whole.slots]
    names = {name for name, p in model.named_parameters() if held.count(id(p)) != 1}
    if names:
        raise ValueError(
            "hold_whole: every parameter must be in one unit and belong to one module, got "
            f"{sorted(names)} elsewhere; shard with FSDP2"
        )
    for whole in wholes:
        for owner, name in whole.slots:
            parameter = cast(nn.Parameter, owner._parameters[name])
            local = DTensor.from_local(parameter.detach(), mesh, [Shard(0)], run_check=False)
            owner._parameters[name] = nn.Parameter(local, parameter.requires_grad)
    return wholes


class Unit:
    """A module that sees its parameters in another type while it runs forward or backward."""

    def __init__(
        self,
        module: nn.Module,
        *,
        param_dtype: torch.dtype,
        reduce_dtype: torch.dtype,
        frees: bool,
    ) -> None:
        """Hook into a module; its parameters are looked up when it first runs."""
        self.slots = [
            (owner, name)
            for owner in module.modules()
            for name, _ in owner.named_parameters(recurse=False)
        ]
        self._param_dtype, self._reduce_dtype, self._frees = param_dtype, reduce_dtype, frees
        # the gradient of an embedding does not depend on its weight
        self._read_in_backward = not isinstance(module, nn.Embedding)
        self._kept: list[nn.Parameter] = []
        self._working: list[nn.Parameter] = []
        self._running = self._in_backward = False
        self._awaited = 0
        module.register_forward_pre_hook(self._before_forward)
        module.register_forward_hook(self._after_forward, always_call=True)

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        del module, args
        if not self._in_backward:  # otherwise a checkpoint runs it again, and all is in place
            self._put_in(cast_now=True)

    def _after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        del args
        if self._in_backward:
            return
        if output is None or not torch.is_grad_enabled():  # it failed, or no backward follows
            self._put_back(free=True)
            return
        self._put_back(free=self._frees)
        if not isinstance(output, Tensor):
            raise TypeError(
                f"hold_whole: a unit must return a tensor, {type(module).__name__} returned "
                f"{type(output).__name__}; shard with FSDP2"
            )
        if output.requires_grad:
            output.register_hook(self._before_backward)

    def _before_backward(self, grad: Tensor) -> None:
        del grad
        if self._in_backward:
            return
        self._in_backward = True
        self._awaited = sum(parameter.requires_grad for parameter in self._working)
        Variable._execution_engine.queue_callback(self._end_backward)
        if self._read_in_backward:
            self._put_in(cast_now=self._frees)

    def _end_backward(self) -> None:
        if self._in_backward:
            self._in_backward = False
            self._put_back(free=True)

    @torch.no_grad()
    def _put_in(self, *, cast_now: bool) -> None:
        """Give the modules the working parameters, with the kept ones' values."""
        if not self._running:
            self._kept = [cast(nn.Parameter, owner._parameters[name]) for owner, name in self.slots]
        kept = [_local(parameter) for parameter in self._kept]
        if not self._working:
            self._working = [self._make_working(n, x) for n, x in enumerate(kept)]
        if cast_now:
            for parameter in self._working:
                parameter.untyped_storage().resize_(parameter.numel() * parameter.itemsize)
            # what autograd saved of them in the forward is the same values again
            working = tuple(self._working)
            with autograd._unsafe_preserve_version_counter(working):
                foreach_copy(working, kept)
        for (owner, name), parameter in zip(self.slots, self._working, strict=True):
            owner._parameters[name] = parameter
        self._running = True

    def _put_back(self, *, free: bool) -> None:
        """Give the modules the kept parameters."""
        if self._running:
            for (owner, name), parameter in zip(self.slots, self._kept, strict=True):
                owner._parameters[name] = parameter
        self._running = False
        if free:
            for parameter in self._working:
                parameter.untyped_storage().resize_(0)

    def _make_working(self, number: int, kept: Tensor) -> nn.Parameter:
        trained = self._kept[number].requires_grad
        working = nn.Parameter(torch.empty_like(kept, dtype=self._param_dtype), trained)
        if trained:
            working.register_post_accumulate_grad_hook(lambda p: self._take_gradient(number, p))
        return working

    @torch.no_grad()
    def _take_gradient(self, number: int, working: Tensor) -> None:
        """Add a working parameter's gradient to the kept one's; after the last, the unit is done.

        Numerics:
            As FSDP2: rounded to the reduction's type, then to the parameter's, then added.
        """
        kept, grad = self._kept[number], cast(Tensor, working.grad)
        working.grad = None
        if kept.grad is None:
            local = _rounded(grad, self._reduce_dtype, kept.dtype)
            mesh, placements = cast(DTensor, kept).device_mesh, cast(DTensor, kept).placements
            kept.grad = DTensor.from_local(local, mesh, placements, run_check=False)
        elif self._reduce_dtype == kept.dtype and grad.dtype.itemsize <= kept.dtype.itemsize:
            _local(kept.grad).add_(grad)  # the sum widens it on the way
        else:
            _local(kept.grad).add_(grad.to(self._reduce_dtype).to(kept.dtype))
        self._awaited -= 1
        if self._awaited == 0:
            self._end_backward()


def _rounded(grad: Tensor, between: torch.dtype, to: torch.dtype) -> Tensor:
    """A gradient, rounded to one type and held in another."""
    if between.itemsize < to.itemsize:
        grad = grad.to(between)
    if grad.dtype == to:
        return grad
    held = torch.empty_like(grad, dtype=to)
    foreach_copy([held], [grad])  # on a GPU two thirds of the time of one tensor's conversion
    return held


def _local(tensor: Tensor) -> Tensor:
    return cast(DTensor, tensor).to_local()
