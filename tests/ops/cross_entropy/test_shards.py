"""A head spread over 2 and 3 processes gives what the whole head gives, on every process."""

import math
import zlib

import pytest
import torch

from tests.ops.cross_entropy.processes import assert_whole, run_sharded
from titan_lowprec.ops.cross_entropy.api import VocabularyShard, linear_cross_entropy

V = 517  # divisible by neither 2 nor 3


def heads(make_head):
    """``{name: (Head, changes of options, arguments of the run)}``; none may need another."""
    cases = {}

    def case(name, head, extra=None, **changes):
        cases[name] = (head, changes, extra or {})

    for rows in (7, 64, 4096):
        case(f"chunks of {rows}", make_head(200, 32, V), {"factor": 1 / 3}, chunk_rows=rows)
    for name, z_loss, softcap in (("z-loss", 1e-2, None), ("soft-cap", 0.0, 3.0)):
        head = make_head(130, 32, V, std=2.0, weighted=True, z_loss=z_loss, softcap=softcap)
        case(name, head, {"factor": -0.3})
    for name, labels in (("first", 0), ("last", V - 1)):
        head = make_head(130, 32, V, ignored=0.0)
        head.labels = head.labels % 50 if labels == 0 else labels - head.labels % 50
        case(f"labels on the {name} shard", head)
    head = make_head(130, 32, V, dtype=torch.float32, std=30.0, ignored=0.0)
    head.weight[:100] *= 20  # exponentials of these rows' logits overflow, others' vanish
    head.labels[::2] %= 100
    case("extreme logits", head)
    head = make_head(60, 16, V)
    head.labels[:3] = -100
    case("ignored rows", head)
    head = make_head(60, 16, V)
    head.labels[:3] = -100
    head.hidden[0], head.hidden[1], head.hidden[2] = math.nan, math.inf, -math.inf
    case("ignored rows, not finite", head)
    case("all ignored", make_head(40, 16, V, ignored=1.1, z_loss=1e-2))
    case("no rows", make_head(0, 16, V))
    for size in (50_257, 163_841, 128_256):
        case(f"V={size}", make_head(24, 8, size), chunk_rows=16)
    case("float64", make_head(50, 16, 97, dtype=torch.float64, z_loss=0.1, softcap=2.0))
    case("one column a shard", make_head(9, 8, 3, dtype=torch.float64))
    for part in ("hidden", "weight"):
        case(f"frozen {part}", make_head(60, 16, V), {"frozen": (part,)})
    case("no gradient", make_head(60, 16, V), {"no_grad": True})
    return cases


@pytest.fixture(scope="module")
def cases():
    """Heads with one seed per shape, so that cases that differ in an option share their values."""
    from tests.ops.cross_entropy.conftest import draw_head

    return heads(lambda *shape, **options: draw_head(zlib.crc32(b"shards"), *shape, **options))


@pytest.fixture(
    scope="module",
    params=[pytest.param(ranks, marks=pytest.mark.slow, id=f"{ranks}-ranks") for ranks in (2, 3)],
)
def outcome(request, cases, tmp_path_factory):
    """``outcome(name)``: the case's head, its factor, and the results of all ranks."""
    ranks = request.param
    usable = {name: case for name, case in cases.items() if case[0].weight.shape[0] >= ranks}
    results = run_sharded(usable, ranks, tmp_path_factory.mktemp(f"shards{ranks}"))

    def of(name):
        head, _, extra = cases[name]
        return head, extra.get("factor", 1.0), results[name]

    return of


EXACT = (
    "chunks of 7",
    "chunks of 64",
    "chunks of 4096",
    "z-loss",
    "soft-cap",
    "labels on the first shard",
    "labels on the last shard",
    "ignored rows",
    "V=50257",
    "V=163841",
    "V=128256",
)


@pytest.mark.parametrize("name", EXACT)
def test_exact_on_every_rank(outcome, times_floor, name):
    assert_whole(*outcome(name), times_floor)


def test_chunks_change_nothing_but_the_order_of_sums(outcome):
    _, _, whole = outcome("chunks of 4096")
    for name in ("chunks of 7", "chunks of 64"):
        _, _, parts = outcome(name)
        for a, b in zip(whole, parts, strict=True):
            torch.testing.assert_close(a.values[1], b.values[1], rtol=1e-6, atol=1e-6)
            for x, y in ((a.grad_hidden, b.grad_hidden), (a.grad_weight, b.grad_weight)):
                assert (x.float() - y.float()).norm() < 1e-3 * y.float().norm()


@pytest.mark.parametrize(("name", "chunks"), [("chunks of 7", 29), ("chunks of 64", 4)])
def test_one_gather_a_chunk_and_one_reduction(outcome, name, chunks):
    for result in outcome(name)[2]:
        assert (result.gathers, result.reductions) == (chunks, 1)


@pytest.mark.parametrize("name", ["chunks of 64", "z-loss", "extreme logits", "V=163841"])
def test_twice_is_the_same_in_bits(outcome, name):
    assert [result.again for result in outcome(name)[2]] == [[]] * len(outcome(name)[2])


def test_extreme_logits_on_one_shard(outcome):
    head, factor, results = outcome("extreme logits")
    truth = head.truth(factor)
    assert truth["lse"].max() > 1000 and truth["lse"].min() > 88
    for result in results:
        loss, _, lse = result.values
        assert abs(loss.double() / truth["loss"] - 1) < 1e-6
        torch.testing.assert_close(lse.double(), truth["lse"], rtol=1e-6, atol=0)
        error = (result.grad_hidden.double() - truth["hidden"]).norm()
        assert error < 1e-4 * truth["hidden"].norm()
    weight = torch.cat([result.grad_weight for result in results])
    assert (weight.double() - truth["weight"]).norm() < 1e-4 * truth["weight"].norm()


def test_non_finite_ignored_rows_reach_nothing(outcome):
    _, _, clean = outcome("ignored rows")
    _, _, dirty = outcome("ignored rows, not finite")
    for a, b in zip(dirty, clean, strict=True):
        assert torch.equal(a.values[0], b.values[0])
        assert torch.equal(a.grad_hidden, b.grad_hidden)
        assert torch.equal(a.grad_weight, b.grad_weight)


@pytest.mark.parametrize("name", ["all ignored", "no rows"])
def test_nothing_to_learn_is_a_connected_zero(outcome, name):
    for result in outcome(name)[2]:
        assert result.values[0] == 0 and not result.values[1].any()
        assert not result.grad_hidden.any() and not result.grad_weight.any()


@pytest.mark.parametrize("name", ["float64", "one column a shard"])
def test_float64_is_exact(outcome, name):
    head, factor, results = outcome(name)
    if head.weight.shape[0] == 3 and len(results) == 2:
        assert [result.grad_weight.shape[0] for result in results] == [2, 1]
    truth = head.truth(factor)
    for result in results:
        for value, expected in zip(result.values, ("loss", "per_token", "lse"), strict=True):
            torch.testing.assert_close(value, truth[expected], rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(result.grad_hidden, truth["hidden"], rtol=1e-11, atol=1e-13)
    weight = torch.cat([result.grad_weight for result in results])
    torch.testing.assert_close(weight, truth["weight"], rtol=1e-11, atol=1e-13)


def test_frozen_parts_form_no_gradient_and_exchange_none(outcome, times_floor):
    head, _, no_hidden = outcome("frozen hidden")
    truth = head.truth()
    assert all(result.grad_hidden is None and result.reductions == 0 for result in no_hidden)
    weight = torch.cat([result.grad_weight for result in no_hidden])
    assert times_floor(weight, truth["weight"]) < 1.1
    _, _, no_weight = outcome("frozen weight")
    assert all(result.grad_weight is None for result in no_weight)
    assert times_floor(no_weight[0].grad_hidden, truth["hidden"]) < 1.1
    _, _, evaluated = outcome("no gradient")
    for result in evaluated:
        assert result.reductions == 0
        for a, b in zip(result.values, no_weight[0].values, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("vocabulary", "ranks", "rows"),
    [(50_257, 2, [25_129, 25_128]), (163_841, 8, [20_481] * 7 + [20_474]), (7, 3, [3, 3, 1])],
)
def test_shards_are_cut_like_torch_chunk(vocabulary, ranks, rows):
    shards = [VocabularyShard(vocabulary, rank, ranks, "tp/a") for rank in range(ranks)]
    assert [shard.rows for shard in shards] == rows
    chunks = torch.arange(vocabulary).chunk(ranks)
    assert [shard.first for shard in shards] == [int(chunk[0]) for chunk in chunks]
    assert [VocabularyShard.decode(shard.encode()) for shard in shards] == shards


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_process_without_a_row_is_refused_on_every_rank(rank):
    with pytest.raises(ValueError, match="every process must hold a row, got 4 rows"):
        VocabularyShard(4, rank, 3, "0")
    with pytest.raises(ValueError, match="rank in the group"):
        VocabularyShard(400, rank + 3, 3, "0")


def test_another_part_of_the_head_is_refused(make_head):
    head = make_head(40, 16, 97)
    shard = VocabularyShard(200, 0, 2, "0")
    with pytest.raises(ValueError, match="must hold 100 of 200 rows, got 97"):
        linear_cross_entropy(head.hidden, head.weight, head.labels, **head.options(), shard=shard)


def test_labels_are_checked_against_the_whole_vocabulary(make_head):
    head = make_head(40, 16, 97)
    head.labels[3] = 194
    shard = VocabularyShard(194, 0, 2, "0")
    with pytest.raises(ValueError, match=r"\[0, 194\).*got 194 in row 3"):
        linear_cross_entropy(head.hidden, head.weight, head.labels, **head.options(), shard=shard)


@pytest.mark.compile
def test_compiled_equals_eager_on_two_ranks(make_head, tmp_path):
    head = make_head(40, 16, V, weighted=True, z_loss=1e-3)
    cases = {"eager": (head, {}, {}), "compiled": (head, {}, {"compiled": True})}
    results = run_sharded(cases, 2, tmp_path)
    for a, b in zip(results["compiled"], results["eager"], strict=True):
        for x, y in zip(a.values, b.values, strict=True):
            assert torch.equal(x, y)
        assert torch.equal(a.grad_hidden, b.grad_hidden)
        assert torch.equal(a.grad_weight, b.grad_weight)


@pytest.mark.slow
def test_opcheck_of_a_shard(make_head, one_rank):
    head = make_head(20, 8, 33)
    shard = VocabularyShard.of_group(33, one_rank.get_group()).encode()
    arguments = (*head.leaves(), head.labels, None, -100, 8, 0.0, None)
    op = torch.ops.titan_lowprec.linear_cross_entropy_forward.default
    torch.library.opcheck(op, (*arguments, "reference", shard, True, True, False))
