"""Quantisation kernels equal the reference in bits; work lists equal a plain-Python one.

On a GPU everything runs; without one, the work lists and one case of quantisation run when Triton
interprets (see ``tests/ops/attention/test_kernel_interpreted.py``).
"""

import itertools

import pytest
import torch

triton = pytest.importorskip("triton")

import triton.language as tl  # noqa: E402

from titan_lowprec.formats.token_blocks import row_metadata  # noqa: E402
from titan_lowprec.ops.hadamard.api import hadamard  # noqa: E402
from titan_lowprec.ops.quantize import kernel  # noqa: E402
from titan_lowprec.ops.quantize.api import quantize_token_blocks  # noqa: E402
from titan_lowprec.testing.poison import poisoned_allocations  # noqa: E402

INTERPRETED = kernel.interpreted()
DEVICE = "cpu" if INTERPRETED else "cuda"
pytestmark = [] if INTERPRETED else [pytest.mark.gpu]
compiled_only = pytest.mark.skipif(INTERPRETED, reason="the interpreter truncates e4m3 casts")

LAYOUTS = {
    "ragged": ([[0, 5, 40, 73, 100]], 110),
    "two rows, empty documents": ([[0, 64, 96, 96], [0, 0, 33, 33]], 96),
    "one token each": ([list(range(41))], 41),
    "no document": ([[0, 0]], 40),
}


def offsets(name):
    lines, row_tokens = LAYOUTS[name]
    return torch.tensor(lines, dtype=torch.int32, device=DEVICE), row_tokens


def expected_items(name, unit, order):
    """Items by a sort: most work first, then as documents lie; tails last."""
    lines, row_tokens = LAYOUTS[name]
    items, base = [], 0
    for row, line in enumerate(lines):
        documents = [(a, b - a, False) for a, b in itertools.pairwise(line)]
        documents.append((line[-1], row_tokens - line[-1], True))
        for first, length, tail in documents:
            units = -(-length // unit)
            for index in range(units):
                work = {"queries": index + 1, "keys": units - index, "full": units}[order]
                start = row * row_tokens + first
                item = [start, -length if tail else length, index, base]
                items.append((0 if tail else -work, item))
            base += -(-length // 32)
    return [item for _, item in sorted(items, key=lambda entry: entry[0])]


@pytest.mark.parametrize("order", ["queries", "keys", "full"])
@pytest.mark.parametrize("name", LAYOUTS)
def test_work_lists_put_the_longest_work_first_and_tails_last(name, order):
    cu_seqlens, row_tokens = offsets(name)
    total = row_tokens * cu_seqlens.shape[0]
    (items,) = kernel.work_lists(cu_seqlens, total_tokens=total, lists=[(64, order)])
    used = [item for item in items.tolist() if item[1] != 0]
    assert used == expected_items(name, 64, order)
    assert not items[len(used) :, 1].any()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("name", LAYOUTS)
def test_lists_made_at_once_are_the_lists_made_alone(name, count):
    cu_seqlens, row_tokens = offsets(name)
    total = row_tokens * cu_seqlens.shape[0]
    lists = [(32, "document"), (64, "keys"), (128, "queries")][:count]
    made = kernel.work_lists(cu_seqlens, total_tokens=total, lists=lists)
    assert len(made) == count
    for items, (unit, order) in zip(made, lists, strict=True):
        (alone,) = kernel.work_lists(cu_seqlens, total_tokens=total, lists=[(unit, order)])
        assert torch.equal(items, alone)
        if order != "document":
            used = [item for item in items.tolist() if item[1] != 0]
            assert used == expected_items(name, unit, order)


@pytest.mark.parametrize("count", [0, 4])
def test_more_lists_than_a_launch_makes_are_refused(count):
    cu_seqlens, row_tokens = offsets("ragged")
    with pytest.raises(ValueError, match=f"one to three, got {count}"):
        kernel.work_lists(cu_seqlens, total_tokens=row_tokens, lists=[(64, "keys")] * count)


def transposed_by_hand(codes_NHD, blocks):
    """The documented layout of transposed codes, token by token, as bytes."""
    _, H, D = codes_NHD.shape
    out = torch.zeros((H, D, 32 * blocks.shape[0]), dtype=torch.uint8, device=codes_NHD.device)
    for slot, (start, length, unit, _) in enumerate(blocks.tolist()):
        for n in range(max(0, min(32, length - 32 * unit))):
            place = 16 * (n // 16) + 4 * (n // 2 % 4) + 2 * (n // 8 % 2) + n % 2
            out[:, :, 32 * slot + place] = codes_NHD[start + 32 * unit + n].view(torch.uint8)
    return out


@compiled_only
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("scales", ["token_block", "token"])
@pytest.mark.parametrize("head_dim, rotate", [(64, True), (96, False), (128, True), (128, False)])
@pytest.mark.parametrize("name", LAYOUTS)
def test_codes_bytes_and_transposed_codes_equal_the_reference(
    name, head_dim, rotate, scales, dtype
):
    compare_with_reference(name, head_dim, rotate, scales, dtype)


@pytest.fixture
def rounding_casts(monkeypatch):
    """Let interpreted e4m3 casts round to nearest and saturate, as compiled ones do."""
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    plain = InterpreterBuilder.create_fp_to_fp

    def cast(builder, source, target, rounding):
        if (source.dtype.scalar, target.scalar) != (tl.float32, tl.float8e4nv):
            return plain(builder, source, target, rounding)
        codes = torch.tensor(source.data).clamp(-448, 448).to(torch.float8_e4m3fn)
        return TensorHandle(codes.view(torch.uint8).numpy(), target.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_fp_to_fp", cast)


@pytest.mark.skipif(not INTERPRETED, reason="compiled, all cases run")
@pytest.mark.parametrize("rotate, dtype", [(True, torch.bfloat16), (False, torch.float32)])
def test_interpreted_codes_equal_the_reference(rounding_casts, rotate, dtype):
    compare_with_reference("no document", 64, rotate, "token_block", dtype)
    compare_with_reference("ragged", 64, rotate, "token_block", dtype)


def compare_with_reference(name, head_dim, rotate, scales, dtype):
    cu_seqlens, row_tokens = offsets(name)
    total = row_tokens * cu_seqlens.shape[0]
    x = torch.randn(total, 3, head_dim) * torch.exp2(torch.randint(-30, 30, (total, 1, 1)).float())
    x[3, 0, 0], x[20, 1, 3], x[10:13] = torch.inf, torch.nan, 0.0
    x = x.to(dtype).to(DEVICE)
    (blocks,) = kernel.work_lists(cu_seqlens, total_tokens=total, lists=[(32, "document")])
    with poisoned_allocations():
        actual = kernel.quantize_operand(x, blocks, scales=scales, rotate=rotate, transpose=True)
    block_N = row_metadata(cu_seqlens, row_tokens=row_tokens).block_index_N
    expected = quantize_token_blocks(hadamard(x) if rotate else x, block_N, scales=scales)
    assert torch.equal(actual.scale_NH, expected.scale_NH)
    assert torch.equal(actual.codes_NHD.view(torch.uint8), expected.codes_NHD.view(torch.uint8))
    columns = 32 * (int((blocks[:, 1] != 0).sum()) + kernel.TILE_BLOCKS)
    by_hand = transposed_by_hand(expected.codes_NHD, blocks)[:, :, :columns]
    assert torch.equal(actual.transposed_HDC.view(torch.uint8)[:, :, :columns], by_hand)


@compiled_only
@pytest.mark.parametrize("scales", ["token_block", "token", None])
def test_the_gradient_is_reduced_with_the_output_from_its_own_codes(scales):
    cu_seqlens, row_tokens = offsets("ragged")
    grad, out = (torch.randn(row_tokens, 2, 128, device=DEVICE).bfloat16() for _ in range(2))
    lse = torch.randn(row_tokens, 2, device=DEVICE)
    (blocks,) = kernel.work_lists(cu_seqlens, total_tokens=row_tokens, lists=[(32, "document")])
    none = torch.empty(0, device=DEVICE)
    actual = kernel.quantize_gradient(grad, out, none, lse, blocks, scales=scales)
    metadata = row_metadata(cu_seqlens, row_tokens=row_tokens)
    place = (metadata.block_index_N * 32 + metadata.position_N % 32)[metadata.block_index_N >= 0]
    live = slice(0, int(cu_seqlens.max()))
    codes, exponent = grad, torch.zeros(row_tokens, 2, device=DEVICE)
    if scales is not None:
        expected = quantize_token_blocks(grad, metadata.block_index_N, scales=scales)
        codes, exponent = expected.codes_NHD, expected.scale_NH.float() - 127
    delta = (codes.float() * out.float()).sum(-1)[live].T
    torch.testing.assert_close(actual.terms_HC2[:, place, 1], delta, rtol=1e-5, atol=1e-3)
    assert torch.equal(actual.terms_HC2[:, place, 0], (lse - exponent)[live].T)
