"""The kernels on a head that is spread over processes, on GPUs; interpreted in test_kernel.py."""

import pytest
import torch

from tests.ops.cross_entropy.processes import assert_whole, run_sharded


def gpu_cases(make_head):
    plain = make_head(3001, 256, 8191)
    softcap = make_head(1100, 128, 5003, std=2.0, weighted=True, z_loss=1e-2, softcap=3.0)
    one_shard = make_head(700, 128, 5003, ignored=0.0)
    one_shard.labels %= 100
    return {
        "plain": (plain, {"chunk_rows": 1024}, {"factor": 1 / 3}),
        "one chunk": (plain, {"chunk_rows": 4096}, {"factor": 1 / 3}),
        "options": (softcap, {"chunk_rows": 512}, {"factor": 0.3}),
        "labels on the first shard": (one_shard, {"chunk_rows": 512}, {}),
        "V=50257": (make_head(700, 128, 50_257), {"chunk_rows": 512}, {}),
        "V=163841": (make_head(700, 128, 163_841), {"chunk_rows": 512}, {}),
    }


def trap_cases(make_head):
    extreme = make_head(600, 128, 5003, std=200.0)
    extreme.hidden[:300] *= 0.01  # these tiles need no correction
    bad = make_head(700, 64, 5003, ignored=0.0)
    bad.labels[5] = 5003
    return {
        "extreme": (extreme, {"chunk_rows": 512}, {}),
        "all ignored": (make_head(700, 64, 5003, ignored=1.1), {"chunk_rows": 512}, {}),
        "bad label": (bad, {"chunk_rows": 512}, {}),
    }


def check_traps(extreme, results):
    """Take the results of `trap_cases` out of ``results`` and look at them."""
    for result in results.pop("bad label"):
        assert result.values[0].isnan()
        assert result.values[1].isnan().nonzero().flatten().tolist() == [5]
        assert result.grad_hidden.isnan().any() and result.grad_weight.isnan().any()
    for result in results.pop("all ignored"):
        assert result.values[0] == 0
        assert not result.grad_hidden.any() and not result.grad_weight.any()
    of_ranks, truth = results.pop("extreme"), extreme.truth()
    weight = torch.cat([result.grad_weight for result in of_ranks])
    assert (weight.double() - truth["weight"]).norm() < 4e-3 * truth["weight"].norm()
    for result in of_ranks:
        assert abs(result.values[0].double() / truth["loss"] - 1) < 1e-6
        error = (result.grad_hidden.double() - truth["hidden"]).norm()
        assert error < 4e-3 * truth["hidden"].norm()


@pytest.mark.gpu
@pytest.mark.parametrize("ranks", [1, 2])
def test_gpu_shards_are_exact(make_head, times_floor, tmp_path, ranks):
    """Run over NCCL, which needs a GPU each, and captured in CUDA graphs."""
    pytest.importorskip("triton")
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")
    cases = {
        name: (head, changes, extra | {"graph": True})
        for name, (head, changes, extra) in gpu_cases(make_head).items()
    } | trap_cases(make_head)
    for _, changes, _ in cases.values():
        changes["impl"] = "triton"
    results = run_sharded(cases, ranks, tmp_path, backend="nccl", device="cuda")
    check_traps(cases["extreme"][0], results)
    for name, of_ranks in results.items():
        assert all(result.again == result.replayed == [] for result in of_ranks), name
        head, _, extra = cases[name]
        assert_whole(head, extra.get("factor", 1.0), of_ranks, times_floor)
