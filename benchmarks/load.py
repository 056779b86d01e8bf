"""Benchmark of training's loader: tokens per second from a hidden/ folder of Kimi-K2.5's sizes, and its memory.

    python -m benchmarks.load --folder /data/load --json load.jsonl            # make bench-load ARGS="..."

Writes random states (bfloat16, then fp8) to --folder, reads them as `train` does, and removes them. Each measurement
has a process of its own:

  read      one row when it is needed, straight to where it is wanted (train.prefetch_rows = 0)
  reused    the same to memory that is used again: what a thread does where a GPU trains
  N ahead   rows read ahead by threads (train.prefetch_rows = N, as many threads, four at most)

`cold` has had the files' pages dropped before: it is the disk's speed where the machine below keeps no copy of its own.
With a GPU, rows go there, by way of pinned memory. `wait` is the share of the time in which a trainer that takes
--trains tokens/s would have waited for rows. Memory is the most that the process held, less what it held before.

Exit codes: 0 measured; 2 wrong usage; 5 no room for the states.
"""

import argparse
import json
import multiprocessing
import os
import shutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.command import Formatter, count, machine
from pipeline.errors import UserError
from pipeline.store import claim, finish, require_space, run_key
from pipeline.store.dtypes import stored_dtype
from pipeline.store.samples import Sample
from pipeline.store.states import StatesReader, shard_bytes, write_states
from pipeline.train.data import Row, Rows, row_bytes
from pipeline.train.loader import RowsAhead

AUX_LAYERS, LAST_LAYER = [2, 30, 58], 61
STORED = {"bf16": None, "fp8": "fp8"}
AHEAD = {"read": 0, "1 ahead": 1, "2 ahead": 2, "4 ahead": 4}
WAYS = ("reused", *AHEAD)


@dataclass(frozen=True)
class Task:
    """One measurement."""

    folder: Path
    stored: str
    way: str
    cold: bool
    row_tokens: int
    trains: float


@dataclass(frozen=True)
class Measured:
    """What came of it."""

    stored: str
    way: str
    cold: bool
    tokens_per_s: float
    disk_bytes_per_s: float
    memory_bytes: int
    wait: float


def main(arguments: list[str] | None = None) -> int:
    """Measure. Returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        runs = [run for stored in STORED for run in _run_all(options, stored)]
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    size = row_bytes(options.row_tokens, len(AUX_LAYERS), options.hidden_size, stored_dtype("bfloat16", None))
    print(f"a row of {options.row_tokens:,} tokens: {size / 1e6:,.0f} MB; {len(os.sched_getaffinity(0))} cores")
    if options.json:
        said = {"benchmark": "load", "machine": machine(), "runs": [asdict(run) for run in runs]}
        with options.json.open("a") as file:
            file.write(json.dumps(said) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.load", description=__doc__, formatter_class=Formatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--folder", type=Path, required=True, metavar="DIR", help="where the states are written (removed afterwards)")
    add("--hidden-size", type=count, default=7168, metavar="N", help="Kimi-K2.5's unless said otherwise")
    add("--tokens", type=count, default=65536, metavar="N", help="all tokens; 57,344 bytes each at Kimi-K2.5's size")
    add("--shard-tokens", type=count, default=16384, metavar="N", help="tokens of a file")
    add("--row-tokens", type=count, default=8192, metavar="N", help="tokens of a row")
    add("--trains", type=float, default=30000, metavar="N", help="tokens/s of the GPU that is to be fed")
    add("--ways", nargs="+", choices=WAYS, default=WAYS, help="which of them")
    add("--json", type=Path, metavar="FILE", help="file to which one line is appended: machine, versions, all runs")
    return parser


def _run_all(options: argparse.Namespace, stored: str) -> list[Measured]:
    """All ways of reading states that are stored in this way."""
    folder: Path = options.folder / f"states-{stored}"
    runs: list[Measured] = []
    try:
        write_hidden(
            folder, options.tokens, options.shard_tokens, options.hidden_size, STORED[stored], wanted_by="load"
        )
        for way in options.ways:
            for cold in (False, True):
                runs.append(_apart(Task(folder, stored, way, cold, options.row_tokens, options.trains)))
                print(_line(runs[-1]), flush=True)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return runs


def write_hidden(
    folder: Path,
    tokens: int,
    shard_tokens: int,
    hidden: int,
    store_dtype: str | None,
    *,
    wanted_by: str,
    vocabulary: int = 1000,
    longest: int = 2048,
) -> None:
    """A finished hidden/ folder of samples of a quarter of `longest` tokens and more, random ids and states."""
    shape: dict[str, Any] = {"aux_layers": AUX_LAYERS, "last_layer": LAST_LAYER, "store_dtype": store_dtype}
    per_shard = shard_bytes(1, shard_tokens, 100, hidden_size=hidden, dtype="bfloat16", **shape)
    require_space(folder, per_shard * -(-tokens // shard_tokens), wanted_by, "--folder")
    random, generator, shards = np.random.default_rng(0), torch.Generator().manual_seed(0), []
    inputs = {"benchmark": wanted_by, "stored": store_dtype}
    claim(folder, "extract", inputs)
    block = torch.randn(4096, 4, hidden, generator=generator).to(torch.bfloat16)  # drawing all would take minutes
    states = block.repeat(-(-shard_tokens // len(block)), 1, 1)[:shard_tokens]
    for number in range(-(-tokens // shard_tokens)):
        samples: list[Sample] = []
        left = shard_tokens
        while left:
            size = min(left, int(random.integers(longest // 4, longest + 1)))
            ids = random.integers(0, vocabulary, size, dtype=np.int32)
            samples.append(Sample(f"s{number}-{left}", f"c{number}-{left}", ids, random.random(size) < 0.6))
            left -= size
        path, own = folder / f"shard-{number:05d}.safetensors", run_key(inputs)
        aux, last = states[:, :3].contiguous(), states[:, 3].contiguous()  # fp8 is made in their place
        shards.append(write_states(path, samples, aux, last, run_key=own, **shape))
    finish(folder, "extract", inputs, shards, {"aux_layers": AUX_LAYERS, "hidden_size": hidden, "dtype": "bfloat16"})


def _apart(task: Task) -> Measured:
    """In a process of its own, so that memory is this measurement's."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_measure, (task,))


def _measure(task: Task) -> Measured:
    torch.set_num_threads(1)  # as `train` does where a GPU computes
    reader = StatesReader(task.folder)
    rows = Rows(reader, list(range(reader.num_samples)), task.row_tokens, 0, 1)
    files = [task.folder / shard.file for shard in reader.manifest.shards]
    for file in files:
        _drop(file) if task.cold else _touch(file)
    order = rows.of_epoch(0)
    held, begun = _memory("VmRSS"), time.monotonic()
    tokens = 0
    if task.way == "reused":
        room = rows.load(order[0])  # its memory is there
        begun = time.monotonic()
        for samples in order:
            tokens += _checked(rows.load(samples, room))
    else:
        device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        with RowsAhead(rows, order, AHEAD[task.way], device) as loader:
            for row in loader:
                tokens += _checked(row)
                loader.give_back(row)
    seconds = time.monotonic() - begun
    size = sum(file.stat().st_size for file in files)
    rate = tokens / seconds
    alone = AHEAD.get(task.way, 0) == 0  # then reading and training take turns
    wait = task.trains / (task.trains + rate) if alone else max(0.0, 1 - rate / task.trains)
    return Measured(task.stored, task.way, task.cold, rate, size / seconds, _memory("VmHWM") - held, wait)


def _checked(row: Row) -> int:
    """Tokens in a row; something of each of its ends is looked at."""
    assert row.aux_RLH[0].isfinite().all()
    return row.documents[-1][1]


def _touch(file: Path) -> None:
    """Have the whole file in the page cache."""
    with file.open("rb") as opened:
        while opened.read(1 << 24):
            pass


def _drop(file: Path) -> None:
    """Have none of it there."""
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def _memory(name: str) -> int:
    """`VmRSS`, what this process has in memory, or `VmHWM`, the most so far (ru_maxrss counts the parent's)."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name))
    return 1024 * int(line.split()[1])


def _line(one: Measured) -> str:
    return (
        f"{one.stored:5} {one.way:8} {'cold' if one.cold else 'cached':7} {one.tokens_per_s:9,.0f} tok/s "
        f"{one.disk_bytes_per_s / 1e9:6.2f} GB/s of file {one.memory_bytes / 1e9:6.2f} GB  wait {100 * one.wait:3.0f} %"
    )


if __name__ == "__main__":
    sys.exit(main())
