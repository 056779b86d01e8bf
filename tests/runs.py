"""Runs for the tests: a configuration file and a prepared/ folder, as the steps leave them; runs in a child process."""

import faulthandler
import hashlib
import os
import re
import select
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from pipeline.store import finish
from pipeline.store.records import DAMAGED
from pipeline.store.samples import Sample, write_samples

CONFIG = """
name = "test"
runs_dir = "{runs_dir}"
[target]
path = "{target}"
dtype = "float32"
max_length = {max_length}
[prepare]
sources = ["unused"]
[extract]
engine = "{engine}"
shard_tokens = {shard_tokens}
"""


CHILD_S = 200.0
"""No child of a test takes so long, on a busy machine either."""


def in_child(work: Callable[[], int | None]) -> int:
    """Start `work` in a process of its own, silent unless it crashes; its result is the exit code. Returns its id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12's, of forks beside threads
        child = os.fork()
    if child:
        return child
    told = os.fdopen(os.dup(2), "w")
    faulthandler.enable(told)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    sys.stdout, sys.stderr = open(os.devnull, "w"), open(os.devnull, "w")  # noqa: SIM115, PTH123
    code = 70
    try:
        code = work() or 0
    except BaseException:  # noqa: BLE001 (of the child: there is nobody to raise it to)
        traceback.print_exc(file=told)
        told.flush()
    finally:
        os._exit(code)


def ended(child: int) -> int:
    """Wait for a child: its exit code, or the negative number of the signal that ended it.

    One that hangs is ended by SIGABRT after CHILD_S, and says where all its threads were.
    """
    descriptor = os.pidfd_open(child)
    try:
        if not select.select([descriptor], [], [], CHILD_S)[0]:
            os.kill(child, signal.SIGABRT)
    finally:
        os.close(descriptor)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


@contextmanager
def small_file_system(folder: Path, size: str) -> Iterator[Path]:
    """A file system in memory, of so many bytes (`256k`), at `folder`. Skips the test where none can be had."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = subprocess.run(mount, capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def errors(said: str) -> list[str]:
    """Lines of stderr without those of progress, which come when it takes long."""
    return [line for line in said.splitlines() if not re.match(r"extract  (the engine |[\d,]+/[\d,]+ samples)", line)]


def make_samples(lengths: list[int], vocab_size: int = 256) -> list[Sample]:
    """Random ids, about half of them supervised; two samples a conversation."""
    random = np.random.default_rng(len(lengths))
    return [
        Sample(
            f"sample-{number}",
            f"conversation-{number // 2}",
            random.integers(0, vocab_size, length).astype(np.int32),
            random.random(length) < 0.5,
        )
        for number, length in enumerate(lengths)
    ]


def write_prepared(folder: Path, samples: list[Sample], name: str = "prepared for a test") -> None:
    """A finished prepared/ folder of two files."""
    folder.mkdir(parents=True, exist_ok=True)
    middle = len(samples) // 2
    parts = [part for part in (samples[:middle], samples[middle:]) if part]
    shards = [write_samples(folder / f"samples-{n:05d}.parquet", part) for n, part in enumerate(parts)]
    finish(folder, "prepare", {"name": name}, shards, {"samples": len(samples)})


def write_run(
    folder: Path,
    target: Path,
    samples: list[Sample],
    *,
    shard_tokens: int = 400,
    max_length: int = 512,
    engine: str = "stream",
) -> Path:
    """A run that is ready for `extract`. Returns its configuration file; the run's folder is folder/runs/test."""
    write_prepared(folder / "runs" / "test" / "prepared", samples)
    config = folder / "run.toml"
    about = {"target": target, "max_length": max_length, "shard_tokens": shard_tokens, "engine": engine}
    config.write_text(CONFIG.format(runs_dir=folder / "runs", **about))
    return config


def inodes(hidden: Path) -> dict[str, int]:
    """Of each shard: a shard that is made again has another one."""
    return {shard.stem: shard.stat().st_ino for shard in hidden.glob("shard-*.safetensors")}


def kept(hidden: Path) -> dict[str, int]:
    """Those of the shards that have their record, in a folder that is not finished: what must not be made again."""
    return {record.stem: inodes(hidden)[record.stem] for record in hidden.glob("shard-*.json")}


def contents(folder: Path) -> dict[str, str]:
    """File name -> checksum; left out are the lock file, which holds the last writer's process id, and files that were
    moved aside because they were damaged."""
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
        if path.name != ".lock" and DAMAGED not in path.name
    }


def damaged(folder: Path) -> list[str]:
    """Names of the files that were moved aside."""
    return sorted(path.name for path in folder.glob(f"*{DAMAGED}*"))
