"""What may depend on what: isolation of documents, prefixes, packing, in bits."""

import pytest
import torch

from titan_lowprec.diagnostics.causal_leak import attention_results, leaking_rows
from titan_lowprec.testing.attention_specs import CAUSAL, STRICT, named_specs

HEADS, KV_HEADS, HEAD_DIM = 2, 1, 32


def document(tokens, *, scale=1.0, dtype=torch.float32):
    """q, k, v and the output's gradient of one document."""
    heads = (HEADS, KV_HEADS, KV_HEADS, HEADS)
    return [(torch.randn(tokens, h, HEAD_DIM) * scale).to(dtype) for h in heads]


def offsets(*lengths, rows=1):
    return torch.tensor([[0, *lengths]] * rows, dtype=torch.int32).cumsum(1).to(torch.int32)


def assert_equal_bits(actual, expected, what):
    for name, a, b in zip(("O", "LSE", "dQ", "dK", "dV"), actual, expected, strict=True):
        assert torch.equal(a, b), f"{name} of {what}"


@pytest.mark.parametrize("name", CAUSAL)
def test_the_same_input_twice_gives_the_same_bits(name):
    inputs = document(130)
    first = attention_results(*inputs, offsets(70, 60), spec=CAUSAL[name])
    second = attention_results(*inputs, offsets(70, 60), spec=CAUSAL[name])
    assert_equal_bits(first, second, "a second run")


FULL_MASK = ("bf16", "mxfp8", "mxfp8-block_scaled", "nvfp4_mixed", "nvfp4_full")
EVERY_SPEC = [(n, "causal") for n in CAUSAL] + [(n, "full") for n in FULL_MASK]


@pytest.mark.parametrize(("name", "mask"), EVERY_SPEC)
def test_a_document_has_the_same_bits_alone_packed_anywhere_and_in_any_row(name, mask):
    spec = named_specs(mask)[name]
    documents = [document(n) for n in (1, 33, 97, 64)]
    alone = [attention_results(*d, offsets(len(d[0])), spec=spec) for d in documents]
    for order, rows in (([0, 1, 2, 3], 1), ([2, 0, 3, 1], 2)):
        packed = [torch.cat([documents[i][part] for i in order]) for part in range(4)]
        tail = [torch.cat((x, torch.full_like(x[:5], torch.nan))) for x in packed]
        repeated = [torch.cat([x] * rows) for x in tail]
        lengths = [len(documents[i][0]) for i in order]
        results = attention_results(*repeated, offsets(*lengths, 0, rows=rows), spec=spec)
        for row in range(rows):
            start = row * len(tail[0])
            for i in order:
                part = slice(start, start + len(documents[i][0]))
                assert_equal_bits([x[part] for x in results], alone[i], f"document {i}, {order}")
                start = part.stop
            assert (results[0][start : start + 5] == 0).all()
            assert (results[1][start : start + 5] == torch.inf).all()
            for gradient in results[2:]:
                assert (gradient[start : start + 5] == 0).all()


def assert_isolated(spec, alignments, *, earlier, later):
    """A document keeps its bits from every offset, whatever the documents around it hold."""
    middle = document(40)
    expected = attention_results(*middle, offsets(40), spec=spec)
    for before in alignments:
        after = 37 - before
        others = [document(before), document(after)]
        for tensors, value in zip(others, (earlier, later), strict=True):
            for x in tensors:
                x[torch.rand(x.shape) < 0.2] = value
        packed = [torch.cat((others[0][part], middle[part], others[1][part])) for part in range(4)]
        results = attention_results(*packed, offsets(before, 40, after), spec=spec)
        part = slice(before, before + 40)
        assert_equal_bits([x[part] for x in results], expected, f"alignment {before}")


@pytest.mark.parametrize(
    "value", [pytest.param(1e30, marks=pytest.mark.slow), torch.inf, torch.nan]
)
@pytest.mark.parametrize("name", CAUSAL)
def test_nothing_in_another_document_changes_a_bit(name, value):
    alignments = range(0, 32, 1 if name == "mxfp8" else 11)
    assert_isolated(CAUSAL[name], alignments, earlier=value, later=value)


@pytest.mark.slow
@pytest.mark.parametrize("values", [(1e30, -1e30), (torch.nan, -torch.inf)])
@pytest.mark.parametrize(("name", "mask"), EVERY_SPEC)
def test_nothing_in_another_document_changes_a_bit_at_any_alignment(name, mask, values):
    """Every recipe and option at all 32 offsets of the boundary in its token block."""
    assert_isolated(named_specs(mask)[name], range(32), earlier=values[0], later=values[1])


CHANGES = {
    "large": lambda x: x * 1e6,
    "huge": lambda x: x * 1e30,
    "two": lambda x: x * 2.0,
    "near_subnormal": lambda x: x * 2.0**-15,
    "zero": torch.zeros_like,
}


def changed_suffix(inputs, start, change):
    """The inputs with every token from ``start`` on redrawn and scaled."""
    suffix = [torch.cat((x[:start], CHANGES[change](torch.randn_like(x[start:])))) for x in inputs]
    return suffix


def tiny_entries(inputs):
    """Entries 2**-14 to 2**-17 of the maximum, which a larger shared scale would round away."""
    out = [x.clone() for x in inputs]
    for x in out:
        small = torch.rand(x.shape) < 0.5
        x[small] *= 2.0 ** -torch.randint(14, 18, (int(small.sum()),))
    return out


@pytest.mark.parametrize(
    "change",
    [
        "near_subnormal",
        *(pytest.param(c, marks=pytest.mark.slow) for c in CHANGES if c != "near_subnormal"),
    ],
)
@pytest.mark.parametrize("name", STRICT)
def test_strict_prefixes_keep_their_bits_in_packed_documents(name, change):
    """O, LSE and, at a fixed gradient, dQ of every row before ``t``; documents before and after."""
    spec = STRICT[name]
    for inputs in (document(150), tiny_entries(document(150))):
        cu = offsets(13, 120, 17)
        before = attention_results(*inputs, cu, spec=spec)
        for t in (1, 32, 70):
            start = 13 + t
            after = attention_results(*changed_suffix(inputs, start, change), cu, spec=spec)
            rows = leaking_rows(before, after, end=start)
            assert rows == {"O": [], "LSE": [], "dQ": []}, (t, rows)


@pytest.mark.parametrize("name", ["bf16", "nvfp4_full"])
def test_recipes_without_shared_token_scales_keep_prefix_bits_in_the_default_mode(name):
    inputs, cu = document(100), offsets(100)
    before = attention_results(*inputs, cu, spec=CAUSAL[name])
    for t in (33, 70):
        after = attention_results(*changed_suffix(inputs, t, "large"), cu, spec=CAUSAL[name])
        assert leaking_rows(before, after, end=t) == {"O": [], "LSE": [], "dQ": []}


DEFAULT_MODE = [
    name
    for name, spec in CAUSAL.items()
    if spec.scales == "token_block" and spec.recipe in ("mxfp8", "nvfp4_mixed")
]


@pytest.mark.parametrize("name", DEFAULT_MODE)
def test_default_mode_leaks_only_inside_the_block_of_the_change(name):
    """With fp32 sums of dQ; with the fp16 boost the earlier rows of dQ may change anywhere."""
    spec = CAUSAL[name]
    leaked = 0
    for _ in range(2):
        inputs, cu = document(100), offsets(9, 91)
        before = attention_results(*inputs, cu, spec=spec)
        for t in (32, 37, 63):
            after = attention_results(*changed_suffix(inputs, 9 + t, "large"), cu, spec=spec)
            rows = leaking_rows(before, after, end=9 + t)
            block_start = 9 + t // 32 * 32
            if spec.dq_accum == "fp16_boost":
                rows["dQ"] = []
            assert all(row >= block_start for leak in rows.values() for row in leak), rows
            leaked += sum(map(len, rows.values()))
    assert leaked > 0, "the probe is too weak: it finds no leak where one is allowed"


def test_one_entry_of_2_is_missed_where_one_of_1e6_leaks():
    """Power-of-two scales keep bits, so small probes prove little."""
    found = {2.0: 0, 1e6: 0}
    for _ in range(10):
        inputs, cu = document(64), offsets(64)
        before = attention_results(*inputs, cu, spec=CAUSAL["mxfp8"])
        for value in found:
            changed = [x.clone() for x in inputs]
            changed[2][40, 0, 0] = value
            after = attention_results(*changed, cu, spec=CAUSAL["mxfp8"])
            found[value] += bool(leaking_rows(before, after, end=40)["O"])
    assert found == {2.0: 0, 1e6: 10}


def test_keys_do_read_later_queries_through_dk_and_dv():
    """dK and dV are sums over later queries: they are exempt from prefix invariance."""
    inputs, cu = document(64), offsets(64)
    before = attention_results(*inputs, cu, spec=CAUSAL["bf16"])
    after = attention_results(*changed_suffix(inputs, 40, "two"), cu, spec=CAUSAL["bf16"])
    assert not torch.equal(before[3][:40], after[3][:40])
    assert not torch.equal(before[4][:40], after[4][:40])
