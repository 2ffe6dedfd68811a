"""The Triton kernels: interpreted on a CPU, then exactness and promises on a GPU."""

import json
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from titan_lowprec.ops.cross_entropy.api import linear_cross_entropy

HERE = Path(__file__).resolve().parent


PLAIN = {"std": 1.0, "softcap": None, "chunk_rows": 40, "factor": 1.0}
CASES = [
    PLAIN | {"chunk_rows": 32, "factor": 1 / 3},
    PLAIN | {"softcap": 2.0},
    PLAIN | {"std": 300.0},  # sums overflow with shift 0: every tile is corrected
]


def interpret(cases, *more):
    """Start `interpreted.py` on cases; the process."""
    command = [sys.executable, str(HERE / "interpreted.py"), json.dumps(cases), *map(str, more)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=HERE.parents[2]
    )


def assert_interpreted(case, errors):
    confident = case["std"] > 100
    assert errors["loss"] < 1e-6, (case, errors)
    assert errors["per_token"] < (2e-3 if confident else 2e-6), (case, errors)
    assert errors["lse"] < (2e-3 if confident else 2e-6), (case, errors)
    assert errors["ignored"] == 0, (case, errors)
    assert errors["hidden"] < 1.1, (case, errors)
    # with all of a row's weight on one wrong token, rounding factor * x counts once more
    assert errors["weight"] < (1.5 if confident else 1.1), (case, errors)


@pytest.mark.slow
def test_interpreted_kernels_match_float64():
    pytest.importorskip("triton")
    process = interpret(CASES)
    output, problems = process.communicate()
    assert process.returncode == 0, problems[-2000:]
    for case, errors in zip(CASES, json.loads(output), strict=True):
        assert_interpreted(case, errors)


@pytest.mark.slow
def test_interpreted_kernels_on_two_shards_match_float64(tmp_path):
    pytest.importorskip("triton")
    processes = [interpret(CASES, rank, 2, tmp_path) for rank in range(2)]
    for rank, process in enumerate(processes):
        _, problems = process.communicate()
        assert process.returncode == 0, problems[-2000:]
        results = json.loads((tmp_path / f"{rank}.json").read_text())
        for case, errors in zip(CASES, results, strict=True):
            assert_interpreted(case, errors)


def run(head, factor=1.0, **changes):
    hidden, weight = head.leaves()
    options = head.options(impl="triton", chunk_rows=512) | changes
    loss, per_token, lse = linear_cross_entropy(hidden, weight, head.labels, **options)
    (loss * factor).backward()
    return loss.detach(), per_token, lse, hidden.grad, weight.grad


def assert_exact(head, times_floor, factor=1.0, **changes):
    loss, per_token, lse, grad_hidden, grad_weight = run(head, factor, **changes)
    truth = head.truth(factor)
    valid = head.labels != -100
    assert abs(loss.double() / truth["loss"] - 1) < 1e-6
    torch.testing.assert_close(per_token.double(), truth["per_token"], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double()[valid], truth["lse"][valid], rtol=2e-6, atol=2e-6)
    assert times_floor(grad_hidden, truth["hidden"]) < 1.1
    assert times_floor(grad_weight, truth["weight"]) < 1.1


@pytest.mark.gpu
@pytest.mark.parametrize("chunk_rows", [128, 1000, 2048, 4096])
@pytest.mark.parametrize("order", ["as drawn", "by label"])
def test_gpu_exact_for_any_chunk_and_row_order(make_head, times_floor, chunk_rows, order):
    head = make_head(3001, 256, 8192, device="cuda")
    if order == "by label":
        rows = head.labels.argsort()
        head.hidden, head.labels = head.hidden[rows], head.labels[rows]
    assert_exact(head, times_floor, 1 / 3, chunk_rows=chunk_rows)


@pytest.mark.gpu
@pytest.mark.parametrize("V", [163_840, 163_841, 129_920, 128_256, 50_257])
def test_gpu_real_vocabularies(make_head, times_floor, V):
    assert_exact(make_head(700, 128, V, device="cuda"), times_floor)


@pytest.mark.gpu
@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_gpu_options(make_head, times_floor, z_loss, softcap):
    head = make_head(
        1100, 128, 5003, device="cuda", std=2.0, weighted=True, z_loss=z_loss, softcap=softcap
    )
    assert_exact(head, times_floor, 0.3)


@pytest.mark.gpu
def test_gpu_sums_outside_the_safe_range_are_corrected(make_head):
    head = make_head(600, 128, 5003, device="cuda", std=200.0)
    head.hidden[:300] *= 0.01  # these tiles need no correction
    loss, _, lse, grad_hidden, grad_weight = run(head)
    truth = head.truth()
    valid = head.labels != -100
    assert truth["lse"].max() > 200 and abs(loss.double() / truth["loss"] - 1) < 1e-6
    torch.testing.assert_close(lse.double()[valid], truth["lse"][valid], rtol=1e-5, atol=1e-5)
    assert (grad_hidden.double() - truth["hidden"]).norm() < 4e-3 * truth["hidden"].norm()
    assert (grad_weight.double() - truth["weight"]).norm() < 4e-3 * truth["weight"].norm()


@pytest.mark.gpu
def test_gpu_traps(make_head, times_floor):
    head = make_head(700, 64, 5003, device="cuda", ignored=1.1)
    loss, _, _, grad_hidden, grad_weight = run(head)
    assert loss == 0 and not grad_hidden.any() and not grad_weight.any()

    head = make_head(700, 64, 5003, device="cuda")
    expected = run(head)
    for a, b in zip(run(head), expected, strict=True):
        assert torch.equal(a, b)  # deterministic
    first = int((head.labels == -100).nonzero()[0])
    head.hidden[first] = math.nan
    assert torch.equal(run(head)[4], expected[4])

    head = make_head(700, 64, 5003, device="cuda", ignored=0.0)
    head.labels[:] = 77  # one label sums every row
    assert_exact(head, times_floor)
    head.labels[5] = 5003
    loss, per_token, _, _, grad_weight = run(head)
    assert loss.isnan() and per_token.isnan().nonzero().flatten().tolist() == [5]
    assert grad_weight.isnan().any()


@pytest.mark.gpu
def test_gpu_frozen_parts_and_no_gradients(make_head):
    head = make_head(700, 64, 5003, device="cuda")
    expected = run(head)
    for frozen in (0, 1):
        leaves = head.leaves()
        leaves[frozen].requires_grad_(False)
        loss, _, _ = linear_cross_entropy(*leaves, head.labels, **head.options(impl="triton"))
        loss.backward()
        assert leaves[frozen].grad is None
        actual, wanted = leaves[1 - frozen].grad, expected[4 - frozen]
        assert (actual.float() - wanted.float()).norm() < 2e-3 * wanted.float().norm()
    with torch.no_grad():
        values = linear_cross_entropy(*head.leaves(), head.labels, **head.options(impl="triton"))
    for value, wanted in zip(values, expected[:3], strict=True):
        torch.testing.assert_close(value, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.gpu
def test_gpu_rows_times_vocabulary_above_int32(make_head):
    head = make_head(16_640, 64, 163_840, device="cuda")
    assert 16_640 * 163_840 > 2**31
    whole = run(head, chunk_rows=16_640)
    parts = run(head, chunk_rows=2048)
    torch.testing.assert_close(whole[1], parts[1], rtol=1e-6, atol=1e-6)
    for a, b in ((whole[3], parts[3]), (whole[4], parts[4])):
        assert (a.float() - b.float()).norm() < 1e-3 * b.float().norm()
    last = slice(16_384, None)
    tail = linear_cross_entropy(
        head.hidden[last], head.weight, head.labels[last], **head.options(chunk_rows=64)
    )
    torch.testing.assert_close(whole[1][last], tail[1], rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_gpu_cuda_graph_replays_on_new_inputs(make_head):
    head = make_head(1024, 64, 5003, device="cuda")
    options = head.options(impl="triton", chunk_rows=512)
    hidden, weight = head.leaves()
    labels = head.labels.clone()
    hidden.grad, weight.grad = torch.zeros_like(hidden), torch.zeros_like(weight)

    def step():
        hidden.grad.zero_()
        weight.grad.zero_()
        loss, _, _ = linear_cross_entropy(hidden, weight, labels, **options)
        (loss / 3).backward()
        return loss.detach()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    with torch.no_grad():
        hidden.copy_(hidden.flip(0) * 100)  # now some tiles need the correction as well
        labels.copy_(labels.roll(7))
    graph.replay()
    head.hidden, head.labels = hidden.detach(), labels
    expected = run(head, 1 / 3)
    assert torch.equal(loss, expected[0])
    assert torch.equal(hidden.grad, expected[3]) and torch.equal(weight.grad, expected[4])


@pytest.mark.gpu
@pytest.mark.compile
def test_gpu_compiled_equals_eager(make_head):
    head = make_head(700, 64, 5003, device="cuda")
    expected = run(head)
    options = head.options(impl="triton", chunk_rows=512)
    step = torch.compile(
        lambda h, w, y: linear_cross_entropy(h * 1, w, y, **options)[0], fullgraph=True
    )
    hidden, weight = head.leaves()
    loss = step(hidden, weight, head.labels)
    loss.backward()
    assert torch.equal(loss, expected[0])
    assert torch.equal(hidden.grad, expected[3]) and torch.equal(weight.grad, expected[4])


def test_triton_refuses_other_dtypes(make_head):
    pytest.importorskip("triton")
    head = make_head(20, 16, 33, dtype=torch.float32)
    with pytest.raises(ValueError, match="requires bf16"):
        run(head)
