"""What the GPUs do, through NVML (nvidia-ml-py): nothing where there is none, or where the driver does not tell."""

import importlib
from dataclasses import dataclass
from typing import Any

from pipeline.preflight.gpus import visible_indices


@dataclass(frozen=True)
class GpuUse:
    """One GPU at one moment: share of the time in which it computed, in percent, and memory in use."""

    index: int
    percent: int
    memory_bytes: int


class GpuMonitor:
    """Opened once, read often; `nvml` stands in for pynvml in tests."""

    def __init__(self, nvml: Any = None):
        self._handles: dict[int, Any] = {}
        try:
            self._nvml = nvml or importlib.import_module("pynvml")
        except ImportError:
            return
        try:
            self._nvml.nvmlInit()
            handles = [self._nvml.nvmlDeviceGetHandleByIndex(i) for i in range(self._nvml.nvmlDeviceGetCount())]
            chosen = visible_indices([self._nvml.nvmlDeviceGetUUID(handle) for handle in handles])
            self._handles = {index: handles[index] for index in chosen}
        except self._nvml.NVMLError:  # no driver: no GPU
            return

    def read(self) -> list[GpuUse]:
        """All GPUs that this process may use and whose driver answers."""
        used: list[GpuUse] = []
        for index, handle in self._handles.items():
            try:
                percent = self._nvml.nvmlDeviceGetUtilizationRates(handle).gpu
                used.append(GpuUse(index, percent, self._nvml.nvmlDeviceGetMemoryInfo(handle).used))
            except self._nvml.NVMLError:  # a slice of a GPU tells no utilisation
                continue
        return used


def gpu_text(used: list[GpuUse]) -> list[str]:
    """`GPU 97 %, 71 GiB`, of several the mean and the fullest."""
    if not used:
        return []
    percent = sum(gpu.percent for gpu in used) / len(used)
    name = "GPU" if len(used) == 1 else f"{len(used)} GPUs"
    return [f"{name} {percent:.0f} %, {max(gpu.memory_bytes for gpu in used) / 2**30:.0f} GiB"]
