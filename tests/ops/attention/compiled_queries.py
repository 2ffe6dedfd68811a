"""Compile dQ for Hopper where no GPU is, and print what became of each variant.

    python compiled_queries.py

A process of its own: kernels that pytest may have defined for the interpreter do not compile, and
triton reports leaks of its own when a process that compiled Gluon ends.
"""

import dataclasses
import itertools
import json

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from titan_lowprec.ops.attention.kernel import support
from titan_lowprec.ops.attention.kernel.queries_sm90 import attention_backward_queries_sm90
from titan_lowprec.ops.attention.spec import AttentionSpec

H100 = GPUTarget("cuda", 90, 32)
POINTERS = {
    "qs_ptr": "*u8",
    "ks_ptr": "*fp32",
    "vs_ptr": "*fp32",
    "gs_ptr": "*u8",
    "lse_ptr": "*fp32",
    "terms_ptr": "*fp32",
    "dq_ptr": "*bf16",
    "items_ptr": "*i32",
}
SCALARS = {"columns": "i32", "score_factor": "fp32", "alpha": "fp32"}


def tile(rows, columns):
    layout = gl.NVMMASharedLayout.get_default_for([rows, columns], gl.float8e4nv)
    return f"tensordesc<fp8e4nv[{rows}, {columns}],{layout!r}>"


def source(head_dim, *, strict, causal):
    rows, columns = tile(64, head_dim), tile(head_dim, 64)
    types = {f"{name}_desc": rows for name in "qkvg"} | {"kt_desc": columns} | POINTERS | SCALARS
    constants = {
        "H": 8,
        "J": 2,
        "D": head_dim,
        "BLOCK_M": 64,
        "CAUSAL": causal,
        "TOKEN": strict,
        "ROTATE": True,
    }
    kernel = attention_backward_queries_sm90
    names = kernel.arg_names
    aligned = [["tt.divisibility", 16]]
    return GluonASTSource(
        kernel,
        {name: types.get(name, "constexpr") for name in names},
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): aligned for name in (*POINTERS, "columns")},
    )


def main():
    for head_dim, scales, mask in itertools.product(
        (64, 128), ("token_block", "token"), ("causal", "full")
    ):
        spec = dataclasses.replace(AttentionSpec.mxfp8(mask=mask), scales=scales)
        launch = support.queries_launch(spec, head_dim)
        compiled = triton.compile(
            source(head_dim, strict=scales == "token", causal=mask == "causal"),
            target=H100,
            options={"num_warps": launch.warps, "maxnreg": launch.registers},
        )
        record = {
            "head_dim": head_dim,
            "by_hand": support.placed_by_hand(spec, head_dim),
            "shared": compiled.metadata.shared,
            "products": compiled.asm["ptx"].count("wgmma.mma_async"),
            "limited": f".maxnreg {launch.registers}" in compiled.asm["ptx"],
        }
        print(json.dumps(record))


if __name__ == "__main__":
    main()
