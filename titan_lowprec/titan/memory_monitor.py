"""Peak memory of a process with or without an accelerator, behind TorchTitan's interface."""

import os
import resource
import sys
from pathlib import Path

import torch
from torchtitan.components.metrics import DeviceMemoryMonitor, DeviceMemStats
from torchtitan.tools.logging import logger

GIB = 1024**3


class CpuMemoryMonitor:
    """Resident memory of this process, where TorchTitan's monitor needs an accelerator.

    ``active`` and ``reserved`` are both the peak resident set size since the last reset. Where
    ``/proc`` is missing, or refuses a reset, it is the peak since the process began.
    """

    def __init__(self, proc: Path = Path("/proc/self")) -> None:
        self._proc = proc
        self.device_name = f"CPU {cpu_model()}".strip()
        self.device_capacity = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        self.device_capacity_gib = self.device_capacity / GIB
        self.reset_peak_stats()

    def get_peak_stats(self) -> DeviceMemStats:
        """Peak resident memory in GiB and in per cent of the machine's."""
        peak_bytes = self._peak_bytes()
        gib, percent = peak_bytes / GIB, 100 * peak_bytes / self.device_capacity
        return DeviceMemStats(gib, percent, gib, percent, num_alloc_retries=0, num_ooms=0)

    def reset_peak_stats(self) -> None:
        """Begin a new peak at the present resident size, where the system can."""
        try:
            (self._proc / "clear_refs").write_text("5")
        except OSError:  # not Linux, or a container that forbids it: see the class docstring
            return

    def _peak_bytes(self) -> int:
        try:
            status = (self._proc / "status").read_text()
        except OSError:
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            return peak if sys.platform == "darwin" else peak * 1024
        fields = dict(line.split(":", 1) for line in status.splitlines() if ":" in line)
        return int(fields["VmHWM"].split()[0]) * 1024


class CudaMemoryMonitor(DeviceMemoryMonitor):
    """TorchTitan's monitor, read every step: it warns when a count grows, not at each reading."""

    _warned = (0, 0)

    def get_peak_stats(self) -> DeviceMemStats:
        """Peak of the caching allocator since the last reset."""
        stats = torch.cuda.memory_stats(self.device)
        active_bytes = stats.get("active_bytes.all.peak", 0)
        reserved_bytes = stats.get("reserved_bytes.all.peak", 0)
        counts = (stats.get("num_alloc_retries", 0), stats.get("num_ooms", 0))
        if counts > self._warned:
            logger.warning(f"CUDA allocator: {counts[0]} retries and {counts[1]} OOMs so far")
            self._warned = counts
        return DeviceMemStats(
            self._to_gib(active_bytes),
            self._to_pct(active_bytes),
            self._to_gib(reserved_bytes),
            self._to_pct(reserved_bytes),
            *counts,
        )


def build_memory_monitor(device_type: str) -> CpuMemoryMonitor | DeviceMemoryMonitor:
    """The monitor of the device that the job trains on."""
    monitor = CpuMemoryMonitor() if device_type == "cpu" else CudaMemoryMonitor(device_type)
    logger.info(
        f"{device_type.upper()} capacity: {monitor.device_name} "
        f"with {monitor.device_capacity_gib:.2f}GiB memory"
    )
    return monitor


def cpu_model() -> str:
    """The processor's model name, or its architecture where the system does not tell."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return os.uname().machine
