"""The benchmark of single kernels adds up launches that were written by hand."""

import pytest
import torch

from tests.titan.benches import load_bench


@pytest.fixture(scope="module")
def bench():
    return load_bench("attention_kernels")


def test_launches_are_added_up_by_part_and_repeat(bench):
    once = [
        ("quantize_rows", 10.0),
        ("_scale_columns", 1.0),
        ("attention_forward", 100.0),
        ("Memset (Device)", 5.0),
        ("attention_backward_queries_sm90", 50.0),
    ]
    again = [(name, 2 * time) for name, time in once]
    assert bench.times_by_part([*once, *again], 2) == {
        "quantise": [11.0, 22.0],
        "forward": [100.0, 200.0],
        "queries": [50.0, 100.0],
    }


def test_launches_that_no_repeats_divide_are_refused(bench):
    with pytest.raises(ValueError, match="forward in 2 equal repeats are required, got 3"):
        bench.times_by_part([("attention_forward", 1.0)] * 3, 2)


def test_every_kernel_of_ours_has_a_part(bench):
    from titan_lowprec.ops.attention.kernel import launch

    kernels = [name for name in vars(launch) if name.startswith("attention_")]
    assert len(kernels) >= 4
    assert {bench.part_of(name) for name in kernels} == {"forward", "keys", "queries"}


@pytest.mark.parametrize("case", ["16x4096", "16x4096-H16-J3", "16x4096-H16-J0", "9x9-H16-J4"])
def test_a_case_that_does_not_exist_is_refused_before_a_gpu_is_asked_for(
    bench, case, monkeypatch, capsys, tmp_path
):
    output = tmp_path / "lines.jsonl"
    monkeypatch.setattr("sys.argv", ["bench", "--output", str(output), "--cases", case])
    with pytest.raises(SystemExit) as ended:
        bench.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and repr(case) in said and "16x4096" in said
    assert not output.exists()


def test_a_name_of_a_case_is_taken_apart(bench):
    case = bench.parse_case("8192+224x256-H32-J8")
    assert case.name == "8192+224x256-H32-J8"
    lengths = (8192, *(256,) * 224)
    assert case.params == {"lengths": lengths, "heads": 32, "kv_heads": 8}


def test_inputs_have_the_head_dimension_that_a_case_names(bench):
    params = {"lengths": (5, 3), "heads": 2, "kv_heads": 1}
    for asked, found in (({}, 128), ({"head_dim": 64}, 64)):
        x = bench.make_inputs(bench.Case("small", params | asked), torch.device("cpu"))
        assert x.q.shape == x.grad.shape == (8, 2, found)
        assert x.k.shape == x.v.shape == (8, 1, found)
        assert x.truth.shape == (5, 2, found)
