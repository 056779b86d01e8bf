"""A campaign of kill -9 at random moments against the step extract.

    make soak                                                   # 1,000 kills, a stand-in for the engine, some minutes
    make soak ARGS="--engine stream --kills 200"                # vLLM; so does --engine speculators
    python -m tests.soak --kills 200 --seed 7                   # another one

Each round makes one hidden/ from nothing, by one process or by two that take a part each, while all of them are killed
again and again, and files are damaged now and then; it ends when the folder is finished. Every kept shard must be whole
after each kill, and the finished folder byte-identical to that of an undisturbed run.
"""

import argparse
import json
import os
import random
import select
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Protocol

from pipeline.__main__ import main as command
from pipeline.extract import engines, step
from pipeline.store import file_sha256
from tests.extraction import HIDDEN, MANIFEST, NUM_LAYERS, Slow
from tests.runs import contents, ended, in_child, make_samples, write_run
from tests.zygote import Zygote

LENGTHS = [30, 1, 50, 20, 45, 60, 5, 5, 64, 12, 33, 7, 60, 60, 2, 18, 40, 22, 9, 51] * 2
LOADING = 0.15
"""Share of the processes that are killed at a moment of the engine's start, if it has one; the others after it."""
PATIENCE = 20
"""Attempts after which one lives twice as long as at first: a machine that has got busy would never finish."""
SMALL_STEPS = ["--extract.max_batched_tokens", "120", "--extract.max_num_seqs", "8"]
"""For vLLM: with its cache in a few megabytes, see tests.zygote."""


class Attempt(Protocol):
    """A process at work; tests.zygote.Attempt is one."""

    def wait_until_ready(self) -> bool:
        """Wait until the engine has started. False: the process ended before."""
        ...

    def end(self, after_s: float | None = None) -> int:
        """Wait until it has ended, or so long, then kill it. Its exit code, or the negative number of the signal."""
        ...


Begin = Callable[[Sequence[str]], Attempt]
"""Starts the command line with arguments in a process of its own."""


@dataclass
class Forked:
    """A child of this process, whose engine is a stand-in and ready at once."""

    pid: int

    @classmethod
    def begin(cls, arguments: Sequence[str]) -> "Forked":
        return cls(in_child(lambda: command(list(arguments))))

    def wait_until_ready(self) -> bool:
        return True

    def end(self, after_s: float | None = None) -> int:
        descriptor = os.pidfd_open(self.pid)
        try:
            if not select.select([descriptor], [], [], after_s)[0]:
                os.kill(self.pid, signal.SIGKILL)
            return ended(self.pid)
        finally:
            os.close(descriptor)


@dataclass
class Result:
    """What a campaign has seen."""

    kills: int = 0
    loading: int = 0
    """Kills at a moment of the engine's start."""
    rounds: int = 0
    damaged: int = 0
    checked_bytes: int = 0


@dataclass
class Campaign:
    """`kills` processes to be killed. `begin` starts them, `flags` are given to each."""

    folder: Path
    target: Path
    kills: int
    seed: int
    begin: Begin = Forked.begin
    flags: list[str] = field(default_factory=list)

    def run(self) -> Result:
        """Kill so many processes. Raises AssertionError where anything is lost or different."""
        self._chance, self._result = random.Random(self.seed), Result()
        whole = self._config("undisturbed")
        self._measure(whole)
        want = contents(_hidden(whole))
        while self._result.kills < self.kills:
            config = self._config(f"round-{self._result.rounds}")
            self._round(config)
            assert contents(_hidden(config)) == want, f"seed {self.seed}, round {self._result.rounds}: other bytes"
            self._result.checked_bytes += _size(_hidden(config))
            self._result.rounds += 1
            shutil.rmtree(config.parent)
        return self._result

    def _config(self, name: str) -> Path:
        return write_run(self.folder / name, self.target, make_samples(LENGTHS), shard_tokens=60, max_length=64)

    def _extract(self, config: Path, *flags: str) -> Attempt:
        return self.begin(["extract", "--config", str(config), *self.flags, *flags])

    def _measure(self, config: Path) -> None:
        """How long an undisturbed run takes, until the engine has started and from then on."""
        attempt = self._extract(config)
        began = time.monotonic()
        assert attempt.wait_until_ready()
        ready = time.monotonic()
        assert attempt.end() == 0
        self._load_s, self._work_s = ready - began, time.monotonic() - ready

    def _round(self, config: Path) -> None:
        """One folder, from nothing to finished."""
        parts = self._chance.choice([1, 1, 2])
        broken: set[str] = set()
        for attempt in count():
            if self._attempt(config, parts, self._work_s / 2 * (1 + attempt / PATIENCE)):
                break
            self._result.checked_bytes += _check_kept(_hidden(config), broken)
            if self._chance.random() < 0.1:
                broken |= _damage(_hidden(config), self._chance)
                self._verify_finished(_hidden(config))
        self._result.damaged += len(broken)
        if parts > 1:
            assert self.begin(["merge", "--config", str(config), *self.flags]).end() == 0

    def _verify_finished(self, hidden: Path) -> None:
        """A process may be killed when its folder is finished: such a one is taken for what it says until verified."""
        if (hidden / MANIFEST).exists():
            self.begin(["verify", str(hidden)]).end()

    def _attempt(self, config: Path, parts: int, longest_s: float) -> bool:
        """One process a part; each lives for a random time, at most `longest_s`, at first half of what it needs. True
        when all finished."""
        flags = [["--extract.shard", f"{n}/{parts}"] if parts > 1 else [] for n in range(1, parts + 1)]
        attempts = [self._extract(config, *more) for more in flags]
        loading = [self._chance.random() < LOADING for _ in attempts]
        moments = [self._chance.random() * (self._load_s if early else longest_s) for early in loading]
        with ThreadPoolExecutor(parts) as pool:
            codes = list(pool.map(_killed, attempts, loading, moments))
        assert set(codes) <= {0, -signal.SIGKILL}, f"exit codes {codes}"
        killed = [early for early, code in zip(loading, codes, strict=True) if code]
        self._result.kills += len(killed)
        self._result.loading += sum(killed)
        return not killed


def _killed(attempt: Attempt, loading: bool, after_s: float) -> int:
    if not loading:
        attempt.wait_until_ready()
    return attempt.end(after_s)


def _check_kept(hidden: Path, broken: set[str]) -> int:
    """What a record says must be so, but for what was `broken`: nothing is lost. Returns the bytes read."""
    size = 0
    for record in hidden.glob("shard-*.json"):
        shard = record.with_suffix(".safetensors")
        if shard.name not in broken:
            assert file_sha256(shard) == json.loads(record.read_bytes())["sha256"], f"{shard} is lost"
            size += shard.stat().st_size
    return size


def _damage(hidden: Path, chance: random.Random) -> set[str]:
    """Flip a bit of, cut or delete one shard, as a failing disk would."""
    shards = sorted(hidden.glob("shard-*.safetensors"))
    if not shards:
        return set()
    shard, how = chance.choice(shards), chance.choice(["flip", "cut", "delete"])
    if how == "flip":
        data = bytearray(shard.read_bytes())
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        shard.write_bytes(data)
    elif how == "cut":
        os.truncate(shard, chance.randrange(shard.stat().st_size))
    else:
        shard.unlink()
    return {shard.name}


def _hidden(config: Path) -> Path:
    return config.parent / "runs" / "test" / "hidden"


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--engine", choices=["stand-in", *engines.ENGINES], default="stand-in")
    options = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        soak = with_stand_in if options.engine == "stand-in" else with_vllm
        result = soak(Path(name), options)
    print(
        f"soak  {options.engine}: {result.kills:,} kills survived ({result.loading:,} while it loads) in "
        f"{result.rounds:,} runs, {result.damaged:,} files damaged and made again, {result.checked_bytes:,} bytes "
        f"checked, nothing lost  seed {options.seed}, {time.monotonic() - began:.0f} s"
    )
    return 0


def with_stand_in(folder: Path, options: argparse.Namespace) -> Result:
    """States are a function of the ids, and there is nothing to load."""
    engines.start = Slow
    step.engine_versions = lambda: {"engine_version": "stand-in 1", "patches": "none"}
    target = folder / "target"
    target.mkdir()
    config = {"model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": NUM_LAYERS, "vocab_size": 300}
    (target / "config.json").write_text(json.dumps(config))
    (target / "model.safetensors").write_bytes(b"weights")
    return Campaign(folder, target, options.kills, options.seed).run()


def with_vllm(folder: Path, options: argparse.Namespace) -> Result:
    """vLLM on the CPU, with a tiny Llama."""
    from tests.models import save_tiny_llama

    target = save_tiny_llama(folder / "llama")
    flags = ["--extract.engine", options.engine, *SMALL_STEPS]
    with Zygote(folder / "said") as zygote:
        return Campaign(folder, target, options.kills, options.seed, zygote.begin, flags).run()


if __name__ == "__main__":
    sys.exit(main())
