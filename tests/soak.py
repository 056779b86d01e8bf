"""A campaign of kill -9 at random moments against the step extract, with a stand-in for its engine.

    make soak                                   # 1,000 kills, some minutes
    python -m tests.soak --kills 200 --seed 7   # another one

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
from dataclasses import dataclass
from pathlib import Path

from pipeline.__main__ import main as command
from pipeline.extract import engines, step
from pipeline.store import file_sha256
from tests.extraction import HIDDEN, NUM_LAYERS, Slow, ended, extract, in_child
from tests.runs import contents, make_samples, write_run

LENGTHS = [30, 1, 50, 20, 45, 60, 5, 5, 64, 12, 33, 7, 60, 60, 2, 18, 40, 22, 9, 51] * 2


@dataclass
class Result:
    """What a campaign has seen."""

    kills: int = 0
    rounds: int = 0
    damaged: int = 0
    checked_bytes: int = 0


def campaign(folder: Path, target: Path, kills: int, seed: int) -> Result:
    """Kill so many processes. Raises AssertionError where anything is lost or different."""
    chance, result = random.Random(seed), Result()
    whole = _run(folder / "undisturbed", target)
    began = time.monotonic()
    assert ended(in_child(lambda: extract(whole))) == 0
    length_s = time.monotonic() - began
    want = contents(_hidden(whole))
    while result.kills < kills:
        place = folder / f"round-{result.rounds}"
        config = _run(place, target)
        parts = chance.choice([1, 1, 2])
        broken: set[str] = set()
        while not _attempt(config, parts, length_s, chance, result):
            result.checked_bytes += _check_kept(_hidden(config), broken)
            if chance.random() < 0.1:
                broken |= _damage(_hidden(config), chance)
        result.damaged += len(broken)
        if parts > 1:
            assert ended(in_child(lambda config=config: command(["merge", "--config", str(config)]))) == 0
        assert contents(_hidden(config)) == want, f"seed {seed}, round {result.rounds}: other bytes"
        result.checked_bytes += _size(_hidden(config))
        result.rounds += 1
        shutil.rmtree(place)
    return result


def _attempt(config: Path, parts: int, length_s: float, chance: random.Random, result: Result) -> bool:
    """One process a part; each lives for a random time, at most half of what it needs. True when all have finished."""
    flags = [["--extract.shard", f"{n}/{parts}"] if parts > 1 else [] for n in range(1, parts + 1)]
    children = [in_child(lambda more=more: extract(config, *more)) for more in flags]
    codes = [_ended_or_killed(child, chance.random() * length_s / 2) for child in children]
    assert set(codes) <= {0, -signal.SIGKILL}, f"exit codes {codes}"
    result.kills += codes.count(-signal.SIGKILL)
    return not any(codes)


def _ended_or_killed(child: int, after_s: float) -> int:
    descriptor = os.pidfd_open(child)
    try:
        if not select.select([descriptor], [], [], after_s)[0]:
            os.kill(child, signal.SIGKILL)
        return ended(child)
    finally:
        os.close(descriptor)


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


def _run(folder: Path, target: Path) -> Path:
    return write_run(folder, target, make_samples(LENGTHS), shard_tokens=60, max_length=64)


def _hidden(config: Path) -> Path:
    return config.parent / "runs" / "test" / "hidden"


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    engines.start = Slow
    step.engine_versions = lambda: {"engine_version": "stand-in 1", "patches": "none"}
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="soak-") as name:
        target = Path(name) / "target"
        target.mkdir()
        config = {"model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": NUM_LAYERS, "vocab_size": 300}
        (target / "config.json").write_text(json.dumps(config))
        (target / "model.safetensors").write_bytes(b"weights")
        result = campaign(Path(name), target, options.kills, options.seed)
    print(
        f"soak  {result.kills:,} kills survived in {result.rounds:,} runs, {result.damaged:,} files damaged and made "
        f"again, {result.checked_bytes:,} bytes checked, nothing lost  seed {options.seed}, "
        f"{time.monotonic() - began:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
