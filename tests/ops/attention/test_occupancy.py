"""How many programs of each attention kernel share a multiprocessor: what their speed hangs on.

A compiler that takes a register more, or a stage that takes a kilobyte more, costs a program
without a word. The limits are Hopper's (CUDA C++ programming guide, compute capability 9.0).
"""

import dataclasses

import pytest

pytest.importorskip("triton")

from titan_lowprec.ops.attention.kernel import launch
from titan_lowprec.ops.attention.spec import AttentionSpec
from titan_lowprec.testing.cases import PackedCase, packed_inputs

pytestmark = pytest.mark.gpu

REGISTERS, SHARED_BYTES, RESERVED_BYTES = 65536, 233472, 1024
QUERIES = ("attention_backward_queries", "attention_backward_queries_sm90")
KERNELS = ("attention_forward", "attention_backward_keys", *QUERIES)


class Recorder:
    """Launches a kernel and keeps what was compiled for it."""

    def __init__(self, kernel):
        self.kernel, self.compiled = kernel, None

    def __getitem__(self, grid):
        def run(*args, **options):
            self.compiled = self.kernel[grid](*args, **options)

        return run


def programs(compiled):
    """Programs of a kernel that a multiprocessor holds at once."""
    warps, shared = compiled.metadata.num_warps, compiled.metadata.shared
    a_warp = -(-compiled.n_regs // 8) * 8 * 32
    return min(REGISTERS // (a_warp * warps), SHARED_BYTES // (shared + RESERVED_BYTES))


@pytest.mark.parametrize("kv_heads", [2, 8])
@pytest.mark.parametrize(
    ("head_dim", "scales", "tile_k", "expected"),
    [
        (128, "token_block", 64, (3, 2, 3)),
        (128, "token_block", 128, (2, 2, 2)),
        (128, "token", 64, (3, 2, 3)),
        (64, "token_block", 64, (5, 3, 4)),
        (64, "token_block", 128, (3, 3, 3)),
        (64, "token", 64, (4, 3, 4)),
    ],
)
def test_programs_of_a_multiprocessor(monkeypatch, head_dim, scales, tile_k, expected, kv_heads):
    kernels = [Recorder(getattr(launch, name)) for name in KERNELS]
    for name, recorder in zip(KERNELS, kernels, strict=True):
        monkeypatch.setattr(launch, name, recorder)
    base = AttentionSpec.mxfp8(mask="causal")
    spec = dataclasses.replace(base, scales=scales, tile_k=tile_k)
    case = PackedCase(rows=((70, 33),), heads=8, kv_heads=kv_heads, head_dim=head_dim)
    x = packed_inputs(case, kind="gaussian", strength=1.0, seed=0, device="cuda")
    saved = launch.forward_triton(x.q_NHD, x.k_NJD, x.v_NJD, x.cu_seqlens_RM, spec)
    launch.backward_triton(x.grad_out_NHD, saved, x.cu_seqlens_RM, spec)
    compiled = [recorder.compiled for recorder in kernels if recorder.compiled is not None]
    assert len(compiled) == len(expected)
    found = tuple(programs(kernel) for kernel in compiled)
    spilled = [kernel.n_spills for kernel in compiled]
    assert all(a >= b for a, b in zip(found, expected, strict=True)), (found, spilled)
