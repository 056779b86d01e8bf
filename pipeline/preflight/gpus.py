"""The GPUs as the driver tells of them, through NVML (nvidia-ml-py): no CUDA context, no torch, milliseconds.

Only the part of NVML used here is asked of `nvml`, so that tests hand in a stand-in.
"""

import os
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Gpu:
    """One GPU. `processes`: process id and bytes of each that computes on it; in a container the host's ids."""

    index: int
    name: str
    total_bytes: int
    free_bytes: int
    processes: tuple[tuple[int, int | None], ...] = ()


@dataclass(frozen=True)
class Gpus:
    """The GPUs that CUDA_VISIBLE_DEVICES leaves, or the `problem` in the way of reading them."""

    driver: str = ""
    visible: tuple[Gpu, ...] = ()
    problem: str | None = None


def read_gpus(nvml: Any = None) -> Gpus:
    """Ask the driver. Nothing is raised: a missing library, driver or permission is `problem`."""
    if nvml is None:
        try:
            import pynvml as nvml
        except ImportError:
            return Gpus(problem="the package nvidia-ml-py is not installed")
    try:
        nvml.nvmlInit()
        try:
            driver = nvml.nvmlSystemGetDriverVersion()
            handles = [nvml.nvmlDeviceGetHandleByIndex(index) for index in range(nvml.nvmlDeviceGetCount())]
            chosen = visible_indices([nvml.nvmlDeviceGetUUID(handle) for handle in handles])
            return Gpus(driver, tuple(_gpu(nvml, index, handles[index]) for index in chosen))
        finally:
            nvml.nvmlShutdown()
    except nvml.NVMLError as error:
        return Gpus(problem=f"the NVIDIA driver cannot be reached ({error})")


def _gpu(nvml: Any, index: int, handle: Any) -> Gpu:
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    try:
        processes = nvml.nvmlDeviceGetComputeRunningProcesses(handle)
    except nvml.NVMLError:  # not every driver tells; the free memory does
        processes = []
    running = tuple((process.pid, process.usedGpuMemory) for process in processes)
    return Gpu(index, nvml.nvmlDeviceGetName(handle), memory.total, memory.free, running)


def visible_indices(uuids: list[str]) -> list[int]:
    """Indices that CUDA_VISIBLE_DEVICES leaves, in its order; as CUDA does, the list ends at the first unknown entry.

    (CUDA C++ Programming Guide, 'CUDA environment variables'. UUIDs may be cut short. NVML itself ignores it.)
    """
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None:
        return list(range(len(uuids)))
    chosen: list[int] = []
    for entry in wanted.split(","):
        name = entry.strip()
        matches = [i for i, uuid in enumerate(uuids) if name == str(i) or (name and uuid.startswith(name))]
        if len(matches) != 1:
            break
        chosen += matches
    return chosen
