"""Machines for tests of training on several: namespaces of this one, each with its own network, name and mounts.

Two of them see each other through one pair of virtual cards, and no other network; they share the file system except
for what is mounted in one of them. A machine lives as long as the pipe to its first process: nothing outlives the test,
however that ends.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

CARD = "wire0"
ADDRESSES = ("192.0.2.1", "192.0.2.2")  # RFC 5737: of documentation, so that no real network has them
NAMES = ("one.test", "two.test")
NEEDED = ("unshare", "nsenter", "ip", "mount")
OWN = ("--net", "--uts", "--mount", "--pid")
FIRST_PROCESS = 'set -e; hostname "$1"; mount --bind "$2" /etc/hosts; ip link set lo up; echo ready; exec cat'


class Machine:
    """One of them. `first` is the id of its first process, as seen from outside."""

    def __init__(self, name: str, hosts: Path):
        command = ["unshare", *OWN, "--fork", "--kill-child", "--mount-proc", "sh", "-c", FIRST_PROCESS]
        self.name = name
        self._unshare = subprocess.Popen(
            [*command, "sh", name, str(hosts)], stdin=-1, stdout=-1, stderr=-1, text=True, process_group=0
        )
        assert self._unshare.stdout
        if self._unshare.stdout.readline() != "ready\n":
            raise OSError(self._unshare.communicate()[1].strip())
        (self.first,) = children(self._unshare.pid)

    def command(self, command: Sequence[str]) -> list[str]:
        """What runs `command` there."""
        return ["nsenter", f"--target={self.first}", *OWN, f"--wd={Path.cwd()}", "--", *command]

    def run(self, *command: str) -> str:
        """Run it and wait. Returns what it printed; raises OSError with what it said when it fails."""
        done = subprocess.run(self.command(command), capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise OSError(f"{' '.join(command)}: {done.stderr.strip()}")
        return done.stdout

    def end(self) -> None:
        """End all of its processes: the first one ends with its pipe, the kernel ends the others."""
        self._unshare.communicate(timeout=30)


@contextmanager
def two_machines(folder: Path) -> Iterator[tuple[Machine, Machine]]:
    """Two machines with a wire between them; `folder` is for their /etc/hosts. Skips the test where none can be had.

    As Debian sets it up, a machine's own name is a loopback address there.
    """
    if missing := [program for program in NEEDED if not shutil.which(program)]:
        pytest.skip(f"no network namespaces without {', '.join(missing)}")
    machines: list[Machine] = []
    try:
        try:
            for own in range(2):
                hosts = folder / f"hosts-{own}"
                addresses = [address if number != own else "127.0.1.1" for number, address in enumerate(ADDRESSES)]
                lines = [f"{address} {name}\n" for address, name in zip(addresses, NAMES, strict=True)]
                hosts.write_text("".join(["127.0.0.1 localhost\n", *lines]))
                machines.append(Machine(NAMES[own], hosts))
            one, two = machines
            # the pair is made with an end in each: nothing of it is ever outside
            pair = ["link", "add", CARD, "type", "veth", "peer", "name", CARD, "netns", str(two.first)]
            made = subprocess.run(
                ["nsenter", f"--target={one.first}", "--net", "ip", *pair], capture_output=True, text=True
            )
            if made.returncode:
                raise OSError(made.stderr.strip())
            for machine, address in zip(machines, ADDRESSES, strict=True):
                machine.run("ip", "address", "add", f"{address}/24", "dev", CARD)
                machine.run("ip", "link", "set", CARD, "up")
        except OSError as error:
            pytest.skip(f"no network namespaces here: {error}")
        yield one, two
    finally:
        for machine in machines:
            machine.end()


def children(pid: int) -> list[int]:
    """Of a process that runs, in order."""
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def kill_all(pid: int) -> None:
    """SIGKILL to a process and all that came from it, the first one first, so that it cannot see to the others."""
    below = children(pid)
    os.kill(pid, signal.SIGKILL)
    for child in below:
        kill_all(child)
