"""The step profile adds up a trace that was written by hand."""

import pytest

from tests.titan.benches import load_bench


@pytest.fixture(scope="module")
def profile():
    return load_bench("step_profile")


def op(name, begin, end, tid=1, cat="cpu_op"):
    return {"cat": cat, "name": name, "ts": begin, "dur": end - begin, "tid": tid}


def launched(name, begin, end, *, at, tid=1, number):
    arguments = {"correlation": number}
    return [
        {
            "cat": "cuda_runtime",
            "name": "launch",
            "ts": at,
            "dur": 1,
            "tid": tid,
            "args": arguments,
        },
        {"cat": "kernel", "name": name, "ts": begin, "dur": end - begin, "args": arguments},
    ]


def test_kernels_belong_to_the_op_that_launched_them(profile):
    events = [
        op("titan_lowprec::attention_forward", 0, 10),
        *launched("quantize_rows", 100, 130, at=5, number=1),
        op("titan_lowprec::linear_cross_entropy", 20, 30),
        *launched("nvjet_gemm", 130, 170, at=25, number=2),
        op("aten::mm", 40, 50),
        *launched("nvjet_gemm", 170, 200, at=45, number=3),
        op("Optimizer.step#AdamW.step", 60, 90, cat="user_annotation"),
        *launched("multi_tensor_apply", 210, 230, at=70, number=4),
        *launched("triton_poi_fused_add", 230, 235, at=95, number=5),
    ]
    assert profile.time_by_group(events) == {
        "attention": 30,
        "head + loss": 40,
        "optimizer": 20,
        "linears": 30,
        "norm + elementwise": 5,
        "exposed communication": 0,
        "gaps": 10,
    }


def test_an_op_stays_open_through_many_inner_ones(profile):
    inner = [op("aten::empty", 10 + i, 10.5 + i) for i in range(1000)]
    events = [
        op("titan_lowprec::linear_cross_entropy", 0, 2000),
        *inner,
        *launched("nvjet_gemm", 0, 10, at=1500, number=1),
    ]
    assert profile.time_by_group(events)["head + loss"] == 10


def test_an_op_of_another_thread_does_not_count(profile):
    events = [
        op("titan_lowprec::attention_backward", 0, 100, tid=2),
        *launched("nvjet_gemm", 0, 10, at=50, tid=1, number=1),
    ]
    assert profile.time_by_group(events)["linears"] == 10


def test_communication_under_a_kernel_is_not_exposed(profile):
    events = [
        *launched("ncclDevKernel_AllGather", 0, 100, at=1, number=1),
        *launched("nvjet_gemm", 20, 70, at=2, number=2),
        *launched("triton_poi", 60, 80, at=3, number=3),
    ]
    times = profile.time_by_group(events)
    assert times["exposed communication"] == 40
    assert times["linears"] == 50
    assert times["norm + elementwise"] == 10
    assert times["gaps"] == 0
    assert sum(times.values()) == 100


def test_a_trace_without_kernels_is_refused(profile):
    with pytest.raises(ValueError, match="device kernels is required, got none"):
        profile.time_by_group([op("aten::mm", 0, 1)])
