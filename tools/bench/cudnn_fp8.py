"""cuDNN's own FP8 attention as a peer of `attention.py`, through `nvidia-cudnn-frontend`.

One scale a tensor, as delayed scaling has it: factors are known before the step (here from a first
run), and a step casts q, k, v and the output's gradient. Output and gradients are e4m3 too. Dense
batches alone: cuDNN's packed form is not timed.
"""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

E4M3_MAX = 448.0
FORWARD_SCALARS = ("descale_q", "descale_k", "descale_v", "descale_s", "scale_s", "scale_o")
BACKWARD_SCALARS = (
    "descale_q", "descale_k", "descale_v", "descale_o", "descale_dO", "descale_s", "descale_dP",
    "scale_s", "scale_dQ", "scale_dK", "scale_dV", "scale_dP",
)  # fmt: skip


def missing() -> str | None:
    """Say what is not installed."""
    if importlib.util.find_spec("cudnn") is None:
        return "nvidia-cudnn-frontend is not installed"
    return None


class CudnnFp8:
    """Causal attention of one shape, forward and backward, on codes ``(B, H, T, D)``."""

    def __init__(self, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Build both graphs; q, k and v are bf16, of any strides with D innermost."""
        cudnn = self.cudnn = importlib.import_module("cudnn")
        self.handle = cudnn.create_handle()
        self.values = {"q": q, "k": k, "v": v}
        one = torch.ones(1, 1, 1, 1, device=q.device)
        self.scalars = {name: one.clone() for name in {*FORWARD_SCALARS, *BACKWARD_SCALARS}}
        self.amax = {name: torch.zeros_like(one) for name in ("s", "o", "dQ", "dK", "dV", "dP")}
        for name, x in self.values.items():
            self.scalars[f"descale_{name}"].fill_(float(x.abs().max()) / E4M3_MAX)
        self._scale("s", 1.0)
        self.codes = {name: self._codes_like(x) for name, x in self.values.items()}
        self.codes |= {name: self._codes_like(q) for name in ("o", "dO", "dQ")}
        self.codes |= {"dK": self._codes_like(k), "dV": self._codes_like(v)}
        B, H, T, _ = q.shape
        self.stats = torch.empty(B, H, T, 1, device=q.device)
        self.forward = self._build(backward=False)
        self.backward = self._build(backward=True)

    @staticmethod
    def _codes_like(x: Tensor) -> Tensor:
        return torch.empty_like(x, dtype=torch.float8_e4m3fn)

    def _scale(self, name: str, amax: float) -> None:
        """Factors of a tensor whose magnitudes reach ``amax``."""
        for key, value in (
            (f"scale_{name}", E4M3_MAX / amax),
            (f"descale_{name}", amax / E4M3_MAX),
        ):
            if key in self.scalars:
                self.scalars[key].fill_(value)

    def _build(self, *, backward: bool) -> Callable[[], None]:
        kinds = self.cudnn.data_type
        graph = self.cudnn.pygraph(
            io_data_type=kinds.FP8_E4M3,
            intermediate_data_type=kinds.FLOAT,
            compute_data_type=kinds.FLOAT,
            handle=self.handle,
        )
        pack: dict[Any, Tensor] = {}

        def take(name: str, x: Tensor, kind: Any) -> Any:
            like = graph.tensor(
                name=name, dim=list(x.shape), stride=list(x.stride()), data_type=kind
            )
            pack[like] = x
            return like

        def give(like: Any, x: Tensor, kind: Any) -> None:
            like.set_output(True).set_dim(list(x.shape)).set_stride(list(x.stride()))
            like.set_data_type(kind)
            pack[like] = x

        operands = ("q", "k", "v", "o", "dO") if backward else ("q", "k", "v")
        inputs = {name: take(name, self.codes[name], kinds.FP8_E4M3) for name in operands}
        scalars = BACKWARD_SCALARS if backward else FORWARD_SCALARS
        inputs |= {name: take(name, self.scalars[name], kinds.FLOAT) for name in scalars}
        options = {"attn_scale": self.values["q"].shape[-1] ** -0.5, "use_causal_mask": True}
        if backward:
            inputs["stats"] = take("stats", self.stats, kinds.FLOAT)
            names = ("dQ", "dK", "dV")
            found = graph.sdpa_fp8_backward(**inputs, **options)
            maxima = dict(zip(("dQ", "dK", "dV", "dP"), found[3:], strict=True))
        else:
            names = ("o",)
            out, stats, amax_s, amax_o = graph.sdpa_fp8(**inputs, **options, generate_stats=True)
            give(stats, self.stats, kinds.FLOAT)
            found, maxima = (out,), {"s": amax_s, "o": amax_o}
        for name, like in zip(names, found, strict=False):
            give(like, self.codes[name], kinds.FP8_E4M3)
        for name, like in maxima.items():
            give(like, self.amax[name], kinds.FLOAT)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([self.cudnn.heur_mode.A])
        graph.check_support()
        graph.build_plans()
        workspace = torch.empty(
            graph.get_workspace_size(), dtype=torch.uint8, device=self.stats.device
        )

        def execute() -> None:
            stream = torch.cuda.current_stream().cuda_stream
            self.cudnn.set_stream(handle=self.handle, stream=stream)
            graph.execute(pack, workspace, handle=self.handle)

        return execute

    def cast(self, name: str, x: Tensor) -> None:
        """Quantise a tensor under its known scale."""
        self.codes[name].copy_(x / self.scalars[f"descale_{name}"])

    def run_forward(self) -> None:
        """Cast q, k and v, and attend."""
        for name, x in self.values.items():
            self.cast(name, x)
        self.forward()

    def run_backward(self, grad: Tensor) -> None:
        """Cast the gradient of the output, and go back."""
        self.cast("dO", grad)
        self.backward()

    def calibrate(self, grad: Tensor) -> None:
        """Take the scales of outputs from a run, twice: those of gradients depend on dP's."""
        self._scale("dO", float(grad.abs().max()))
        for _ in range(2):
            self.run_forward()
            self.run_backward(grad)
            for name in ("o", "dP", "dQ", "dK", "dV"):
                self._scale(name, max(float(self.amax[name]), 1e-6))
        self.run_forward()

    def output(self) -> Tensor:
        """Output of the last forward, in fp32."""
        return self.codes["o"].float() * self.scalars["descale_o"]
