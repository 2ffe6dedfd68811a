"""Forward and backward of a microbatch as one CUDA graph: captured once, then replayed.

Packed documents make this possible: ``cu_seqlens`` has a fixed length and its unused end repeats
the row's total, so every layout of documents has the same shapes. The optimizer stays outside.
Where a step has one microbatch, its gradients are made inside the graph, in memory that activations
use before them, and each replay overwrites them; several accumulate by replaying into the same
``.grad`` tensors.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torchtitan.tools.logging import logger

Tensor = torch.Tensor
Inputs = dict[str, Tensor]
Run = Callable[[Inputs, Tensor, Tensor], Tensor]
"""Queue forward and backward for inputs, labels and denominator on a device; return the loss."""

LABELS = "labels"
DENOMINATOR = "denominator"
OFFSETS = "cu_seqlens"


class OverCapacity(RuntimeError):
    """A row has more documents than the graph was captured for, and that is to be an error."""


class EagerMicrobatch:
    """What runs without ``[graph]``: the same calls, nothing captured."""

    keeps_gradients = False
    replays = 0
    over_capacity = 0

    def __init__(self, run: Run, device: torch.device) -> None:
        self._run, self._device = run, device

    def __call__(
        self, inputs: Inputs, labels: Tensor, denominator: Tensor, *, eager: bool = False
    ) -> Tensor:
        """The loss of a microbatch on the host; its gradients have been added."""
        del eager
        inputs = {name: x.to(self._device, non_blocking=True) for name, x in inputs.items()}
        return self._run(inputs, labels.to(self._device, non_blocking=True), denominator)

    def clear_gradients(self, optimizers: Any) -> None:
        """Begin a step without gradients."""
        optimizers.zero_grad(set_to_none=True)

    def close(self) -> None:
        """Nothing to free."""


class MicrobatchGraph:
    """Replays a captured forward and backward; runs eagerly where it must.

    The first ``warmup`` calls run eagerly on the stream of the capture: two optimizer steps, after
    which gradients, optimizer states and compiled code exist. From then on ``.grad`` tensors stay
    (``keeps_gradients``): the graph writes, or adds, to those very tensors.
    """

    def __init__(
        self,
        run: Run,
        *,
        parameters: Iterable[torch.nn.Parameter],
        warmup: int,
        max_documents: int,
        over_capacity: Literal["eager", "error"],
        overwrites: bool,
        device: torch.device,
    ) -> None:
        """Plan a capture; nothing runs yet.

        Args:
            run: Forward and backward of inputs that are on the device.
            parameters: What ``run`` makes gradients for.
            warmup: Calls before the capture.
            max_documents: Documents of a row that the captured attention has room for.
            over_capacity: What to do with a microbatch that has more in some row.
            overwrites: A step has one microbatch, and its gradients replace those before.
            device: A CUDA device.
        """
        self.replays = 0
        """Microbatches replayed."""
        self.over_capacity = 0
        """Microbatches that ran eagerly because a row had more documents than the graph holds."""
        self._run, self._device = run, device
        self._parameters = [p for p in parameters if p.requires_grad]
        self._warmup, self._capacity = warmup, max_documents
        self._on_overflow = over_capacity
        self._overwrites = overwrites
        self._stale = False  # gradients are of the step before
        self._stream = torch.cuda.Stream(device)
        self._graph: torch.cuda.CUDAGraph | None = None
        self._static: Inputs = {}
        self._gradients: list[Any] = []
        self._loss: Tensor | None = None

    @property
    def keeps_gradients(self) -> bool:
        """Whether ``.grad`` tensors must stay: zero them, never drop them."""
        return self._warmup == 0

    def clear_gradients(self, optimizers: Any) -> None:
        """Begin a step without gradients; a replay that overwrites them needs no zeros."""
        if self._overwrites and self.keeps_gradients:
            self._stale = True
        else:
            optimizers.zero_grad(set_to_none=not self.keeps_gradients)

    def __call__(
        self, inputs: Inputs, labels: Tensor, denominator: Tensor, *, eager: bool = False
    ) -> Tensor:
        """Run a microbatch; its gradients have been added when the stream reaches this point.

        Args:
            inputs: By name, on the host (pinned memory is copied without waiting).
            labels: On the host.
            denominator: Divisor of the loss, on the device.
            eager: Run this one eagerly, for hooks that look into the model.

        Returns:
            The loss, a tensor of the caller's.

        Raises:
            OverCapacity: Too many documents in a row, and the options make that an error.
            ValueError: Names, shapes or types differ from those of the capture.
            RuntimeError: Gradients were dropped since the capture.
        """
        overflow = not self._fits(inputs)
        self.over_capacity += overflow
        if self._warmup > 0 or eager or overflow:
            return self._eagerly(inputs, labels, denominator)
        batch = {**inputs, LABELS: labels, DENOMINATOR: denominator}
        if self._graph is None:
            self._capture(batch)
        else:
            self._check(batch)
        self._fill(batch)
        assert self._graph is not None and self._loss is not None
        self._graph.replay()
        self._stale = False
        self.replays += 1
        return self._loss.clone()

    def close(self) -> None:
        """Free the graph and its memory; before the process group goes."""
        if self._graph is not None:
            torch.cuda.synchronize(self._device)
            self._graph.reset()
        self._graph, self._loss = None, None
        self._static, self._gradients = {}, []

    def _fits(self, inputs: Inputs) -> bool:
        offsets = inputs[OFFSETS]
        if offsets.shape[1] <= self._capacity + 1:
            return True
        documents = int((offsets.diff(dim=1) > 0).sum(dim=1).max())
        if bool((offsets[:, self._capacity] == offsets[:, -1]).all()):
            return True
        if self._on_overflow == "error":
            raise OverCapacity(
                f"graph: a row must have at most graph.max_documents={self._capacity} documents "
                f'with graph.over_capacity = "error", got {documents}; raise graph.max_documents, '
                'or set graph.over_capacity = "eager"'
            )
        return False

    def _eagerly(self, inputs: Inputs, labels: Tensor, denominator: Tensor) -> Tensor:
        self._warmup = max(self._warmup - 1, 0)
        self._drop_stale()
        current = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            inputs = {name: x.to(self._device, non_blocking=True) for name, x in inputs.items()}
            labels = labels.to(self._device, non_blocking=True)
            loss = self._run(inputs, labels, denominator)
        current.wait_stream(self._stream)
        return loss

    def _drop_stale(self) -> None:
        """Make room for the gradients of an eager call, which adds to what is there."""
        if self._stale:
            for p in self._parameters:
                if self._graph is None:
                    p.grad = None
                elif p.grad is not None:
                    p.grad.zero_()
        self._stale = False

    def _capture(self, batch: Inputs) -> None:
        """Record the graph; nothing is computed until it is replayed."""
        self._static = {
            name: torch.empty(x.shape, dtype=x.dtype, device=self._device)
            for name, x in batch.items()
        }
        self._fill(batch)  # indices are in range, should a kernel run after all
        if self._overwrites:
            for p in self._parameters:
                p.grad = None
        before = [p.grad for p in self._parameters]
        graph = torch.cuda.CUDAGraph()
        # other threads (NCCL's watchdog, the loader's pinning) go on calling CUDA meanwhile
        capture = torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local")
        with _no_garbage_collection(), capture:
            inputs = dict(self._static)
            labels, denominator = inputs.pop(LABELS), inputs.pop(DENOMINATOR)
            inputs[OFFSETS] = inputs[OFFSETS][:, : self._capacity + 1].contiguous()
            self._loss = self._run(inputs, labels, denominator)
        self._gradients = [p.grad for p in self._parameters]
        moved = any(a is not b for a, b in zip(before, self._gradients, strict=True))
        if moved and not self._overwrites:
            raise RuntimeError(
                "graph: the eager steps before a capture must give every trained parameter its "
                "gradient, got new ones during the capture, which replays could not add to; "
                "freeze parameters that not every microbatch uses, or set graph.enable = false"
            )
        self._graph = graph
        rows, tokens = self._static["input"].shape
        logger.info(
            f"CUDA graph captured: forward and backward of {rows} x {tokens} tokens, "
            f"up to {self._capacity} documents a row"
        )

    def _check(self, batch: Inputs) -> None:
        got, captured = _layout(batch), _layout(self._static)
        if got != captured:
            raise ValueError(
                f"graph: a microbatch must be as the captured one, {captured}, got {got}; set "
                "graph.enable = false for batches whose shapes change"
            )
        if any(p.grad is not g for p, g in zip(self._parameters, self._gradients, strict=True)):
            raise RuntimeError(
                "graph: gradients must stay in their tensors, got others since the capture; "
                "zero them with zero_grad(set_to_none=False)"
            )

    def _fill(self, batch: Inputs) -> None:
        for name, buffer in self._static.items():
            buffer.copy_(batch[name], non_blocking=True)


def _layout(batch: Inputs) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    return {name: (tuple(x.shape), x.dtype) for name, x in sorted(batch.items())}


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """A collection could free tensors of another stream in the midst of a capture."""
    enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
