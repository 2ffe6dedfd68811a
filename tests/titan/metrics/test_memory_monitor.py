import pytest
import torch

from titan_lowprec.titan.memory_monitor import CpuMemoryMonitor, build_memory_monitor


def test_cpu_peak_memory_grows_with_a_tensor_and_falls_after_a_reset():
    monitor = CpuMemoryMonitor()
    before = monitor.get_peak_stats().max_reserved_gib
    block = torch.ones(64, 1024, 1024)  # 256 MiB
    grown = monitor.get_peak_stats().max_reserved_gib
    assert 0.2 < grown - before < 0.4
    del block
    try:
        (monitor._proc / "clear_refs").write_text("5")
    except OSError:
        pytest.skip("this system does not reset the peak")
    assert monitor.get_peak_stats().max_reserved_gib < grown - 0.15


def test_cpu_monitor_without_proc_reports_the_peak_of_the_process(tmp_path):
    monitor = CpuMemoryMonitor(proc=tmp_path)
    stats = monitor.get_peak_stats()
    assert stats.max_active_gib == stats.max_reserved_gib > 0.05
    assert 0 < stats.max_reserved_pct < 100
    assert monitor.device_name.startswith("CPU")


@pytest.mark.gpu
def test_cuda_peak_memory_is_that_of_the_allocator_since_the_reset():
    monitor = build_memory_monitor("cuda")
    block = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    assert monitor.get_peak_stats().max_active_gib >= 1.0
    del block
    torch.cuda.empty_cache()
    monitor.reset_peak_stats()
    assert monitor.get_peak_stats().max_reserved_gib < 0.5
    assert monitor.device_name == torch.cuda.get_device_name()
