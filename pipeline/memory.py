"""Memory that a process here can still have: the machine's, and its container's or job's."""

import re
from pathlib import Path

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def room_bytes() -> int:
    """What both leave."""
    available, limit = available_bytes(), cgroup_room()
    return available if limit is None else min(available, limit)


def available_bytes() -> int:
    """Memory of this machine that is free for use, by the kernel's estimate."""
    found = re.search(r"^MemAvailable:\s+(\d+) kB", MEMINFO.read_text(), re.MULTILINE)
    assert found, f"{MEMINFO} has no MemAvailable (Linux 3.14 and later do)"
    return int(found[1]) * 1024


def cgroup_room() -> int | None:
    """Limit less use of this container, file cache that can be dropped not counted as used; None without a limit."""
    for limit_file, use_file, cache in (
        ("memory.max", "memory.current", "inactive_file"),  # cgroup v2
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),  # v1
    ):
        try:
            limit, used = (CGROUP / limit_file).read_text().strip(), int((CGROUP / use_file).read_text())
            stat = (CGROUP / use_file).with_name("memory.stat").read_text()
        except OSError:
            continue
        if not limit.isdecimal() or int(limit) > 1 << 60:  # "max", and v1's near-2**63, are no limit
            return None
        dropped = re.search(rf"^{cache} (\d+)$", stat, re.MULTILINE)
        return max(0, int(limit) - used + int(dropped[1] if dropped else 0))
    return None
