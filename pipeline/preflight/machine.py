"""Checks of the machine: GPUs, memory, shared memory, limits."""

import re
import resource
import shutil
from pathlib import Path

from pipeline import engine, memory
from pipeline.preflight.finding import Facts, Finding, State
from pipeline.preflight.gpus import Gpu
from pipeline.preflight.inputs import readable_target, states_in_memory, weight_bytes

DRIVER_AT_LEAST = 580
"""What users of the RTX PRO 6000 found to work (local-inference-lab/rtx6kpro). An older one is warned of."""
SHM_BYTES = 8e9
"""Shared memory that several GPU processes are given at least: NCCL and data loaders live in it, Docker's default is
64 MB."""
OPEN_FILES = 65535
"""What vLLM raises its own limit to, where the hard limit lets it (vllm.utils.system_utils.set_ulimit, 0.16)."""

SHM = Path("/dev/shm")
CONTAINER_MARKS = (Path("/.dockerenv"), Path("/run/.containerenv"))


def gpu_count(facts: Facts) -> Finding:
    """As many GPUs as the run wants, and what they are."""
    if facts.without_gpus:
        return Finding(State.NOT_APPLICABLE, facts.without_gpus)
    gpus, wanted = facts.gpus, facts.gpus_wanted
    if gpus.problem:
        return Finding(State.FAIL, f"{facts.engine} needs GPUs, but {gpus.problem}. {_how_to_get_gpus()}")
    names = {(gpu.name, gpu.total_bytes) for gpu in gpus.visible}
    shown = f"{len(gpus.visible)} x {' / '.join(f'{name}, {_gb(total)}' for name, total in sorted(names))}"
    if len(gpus.visible) < wanted:
        have = shown if gpus.visible else "no GPU"
        return Finding(
            State.FAIL,
            f"{have}, {wanted} wanted (target.tensor_parallel_size {facts.config.target.tensor_parallel_size}, or "
            "GPU_COUNT). Lower these, or let the container and CUDA_VISIBLE_DEVICES see more",
        )
    return Finding(State.OK, shown)


def _how_to_get_gpus() -> str:
    if any(mark.exists() for mark in CONTAINER_MARKS):
        return (
            "The container was given none: install the NVIDIA container toolkit on the host, and reserve GPUs "
            "(compose: deploy.resources.reservations.devices; docker run: --gpus all)"
        )
    return f"Install the NVIDIA driver ({DRIVER_AT_LEAST} or later); nvidia-smi must list the GPUs"


def gpu_memory(facts: Facts) -> Finding:
    """The share of each GPU that the engine will ask for is free; vLLM refuses to start otherwise."""
    if facts.without_gpus or not facts.gpus.visible:
        return Finding(State.NOT_APPLICABLE, facts.without_gpus or "no GPU is seen")
    share, wanted, gpus = facts.config.target.gpu_memory_utilization, facts.gpus_wanted, facts.gpus.visible
    short = [gpu for gpu in gpus if gpu.free_bytes < share * gpu.total_bytes]
    frees = f"free: {', '.join(f'{gpu.free_bytes / 1e9:.1f}' for gpu in gpus)} GB of {_gb(gpus[0].total_bytes)}"
    if not short:
        return Finding(State.OK, f"{frees}; the engine takes {share:.0%}")
    more = tuple(
        f"GPU {gpu.index}: {_gb(gpu.free_bytes)} free, {_gb(share * gpu.total_bytes)} wanted{_holders(gpu)}"
        for gpu in short
    )
    fails = any(gpu in gpus[:wanted] for gpu in short)
    advice = "End what holds it, or lower target.gpu_memory_utilization" if fails else "This run does not need those"
    return Finding(State.FAIL if fails else State.WARNING, f"{frees}; the engine takes {share:.0%}. {advice}", more)


def _holders(gpu: Gpu) -> str:
    held = [f"process {pid}" + (f" ({_gb(size)})" if size else "") for pid, size in gpu.processes]
    return f"; held by {', '.join(held)}" if held else ""


def gpu_driver(facts: Facts) -> Finding:
    """The driver's version."""
    if facts.without_gpus or facts.gpus.problem:
        return Finding(State.NOT_APPLICABLE, facts.without_gpus or "no driver is reached")
    major = re.match(r"\d+", facts.gpus.driver)
    if major and int(major[0]) >= DRIVER_AT_LEAST:
        return Finding(State.OK, facts.gpus.driver)
    return Finding(State.WARNING, f"{facts.gpus.driver}: {DRIVER_AT_LEAST} or later is known to work. Update it")


def host_memory(facts: Facts) -> Finding:
    """Memory that can still be had, by the machine and by the container's own limit."""
    available, limit = memory.available_bytes(), memory.cgroup_room()
    text = f"{_gb(available)} available"
    if limit is not None:
        text += f", {_gb(limit)} left under the container's limit"
        available = min(available, limit)
    needed, what = _memory_wanted(facts)
    if needed and available < needed:
        advice = "End other processes, or raise the container's memory limit"
        return Finding(State.WARNING, f"{text}; about {_gb(needed)} wanted ({what}). {advice}")
    return Finding(State.OK, text + (f"; about {_gb(needed)} wanted ({what})" if needed else ""))


def _memory_wanted(facts: Facts) -> tuple[float, str]:
    """What the largest step is known to hold, and what that is; 0 where the target cannot be read yet."""
    target = readable_target(facts.config)
    if target is None:
        return 0, ""
    extract = states_in_memory(facts.config, target)
    if facts.without_gpus:
        size = weight_bytes(target.folder) + engine.CPU_KV_CACHE_GB * 1e9
        return size + extract, f"the engine's weights, keys and values{', and the shards in hand' if extract else ''}"
    train = 8.0 * target.vocab_size * target.hidden_size * facts.gpus_wanted
    if extract > train:
        return extract, "extract: the shards in hand"
    return train, f"train: the target's embedding and output rows in float32, {facts.gpus_wanted} processes"


def shared_memory(facts: Facts) -> Finding:
    """The size of /dev/shm, which several GPU processes share data through."""
    several = facts.config.target.tensor_parallel_size > 1
    several = several or (not facts.without_gpus and len(facts.gpus.visible) > 1)
    if not SHM.is_dir():
        return Finding(State.WARNING if several else State.OK, f"{SHM} does not exist")
    size = shutil.disk_usage(SHM).total
    if several and size < SHM_BYTES:
        advice = "Set shm_size in the compose file (docker run --shm-size 32g)"
        return Finding(State.WARNING, f"{_gb(size)}; several GPUs want {_gb(SHM_BYTES)} or more. {advice}")
    return Finding(State.OK, _gb(size))


def limits(facts: Facts) -> Finding:
    """Limits on locked memory and open files."""
    locked, files = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    unlimited = resource.RLIM_INFINITY
    memlock = "unlimited" if locked == unlimited else f"{locked / 1e6:.1f} MB"
    nofile = "unlimited" if files == unlimited else f"{files:,}"
    advice = []
    if not facts.without_gpus and locked != unlimited:
        advice.append("Pinned buffers want unlimited memlock (compose: ulimits: {memlock: -1})")
    if files != unlimited and files < OPEN_FILES:
        advice.append(f"vLLM wants {OPEN_FILES:,} open files (compose: ulimits: {{nofile: 1048576}})")
    state = State.WARNING if advice else State.OK
    return Finding(state, ". ".join([f"locked memory {memlock}, open files {nofile}", *advice]))


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:,.1f} GB"
