"""Benchmark of `train`: our trainer beside speculators 0.9.0's on the same rows, in one run, with random weights.

    python -m benchmarks.train --reference /wheels/speculators-0.9.0 --json figures.jsonl
    python -m benchmarks.train --tiny                                  # a CPU's check that all of it runs

--reference is a folder that only the other side's processes get on their path: `pip install --no-deps --target FOLDER
speculators==0.9.0` with the transformers 5 that it asks for. Without it only ours is measured.

Each measurement is a process of its own, the sides take turns. A step is forward, backward, clipping and optimiser over
one row that lies on the GPU already; rows differ in documents and supervised spans. tok/s counts all tokens of a row.
TFLOP/s (of everything) credits both sides with the same work: every index computed in every step. TFLOP/s (done)
counts what a side computes; ours leaves out what the loss does not need. Both by `operations` in training.py.
The losses are of other kinds, ours a cross entropy, the other's a divergence: they only show that each side learns.

Exit codes: 0 measured; 1 a measurement failed, or --require was not met; 2 wrong usage.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import asdict, replace
from itertools import product
from pathlib import Path
from statistics import median

from benchmarks.command import Formatter, count, machine
from benchmarks.training import SIDES, TINY, Setting, Trained, measure

SPEED, MEMORY = 1.15, 0.75
"""What `--require` asks for at 8192 tokens and 3 steps: so many times the other's tok/s, in so much of its memory."""
REQUIRED_AT = (8192, 3)


def main(arguments: list[str] | None = None) -> int:
    """Measure. Returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    options = _parser().parse_args(given)
    if options.side:
        trained = measure(options.side, Setting(**json.loads(options.setting)))
        options.result.write_text(json.dumps(trained.facts()))
        return 0
    if options.reference and not (options.reference / "speculators").is_dir():
        print(f"bench: --reference {options.reference} holds no folder speculators", file=sys.stderr)
        return 2
    failed, met, runs = False, False, []
    for setting in _settings(options):
        measured = _alternating(options, setting)
        failed |= any(not of_side for of_side in measured.values())
        sides = {side: _median(of_side) for side, of_side in measured.items() if of_side}
        print(_page(setting, sides), flush=True)
        if (setting.tokens, setting.steps) == REQUIRED_AT:
            met = _is_met(sides)
        runs.append({"setting": asdict(setting), "runs": [r.facts() for m in measured.values() for r in m]})
    if options.json:
        with options.json.open("a") as file:
            file.write(json.dumps({"benchmark": "train", "machine": machine(), "settings": runs}) + "\n")
    return 1 if failed or (options.require and not met) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.train", description=__doc__, formatter_class=Formatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--reference", type=Path, metavar="DIR", help="folder with speculators 0.9.0 and what it needs beyond ours")
    add("--reference-loss", choices=("fused", "eager"), default="fused",
        help="the other side's --loss-implementation; its own default, fused, torch 2.11 cannot compile")  # fmt: skip
    add("--tokens", type=_counts, default=[4096, 8192], metavar="N,N", help="lengths of a row")
    add("--steps", type=_counts, default=[3, 7], metavar="N,N", help="TTT steps")
    add("--supervised", type=float, default=0.6, metavar="X", help="share of tokens that are the target's own")
    add("--train-lm-head", action="store_true",
        help="train the output rows on both sides; by default neither does, as speculators 0.9.0")  # fmt: skip
    add("--optimizer", choices=("adamw", "muon"), default="adamw", help="of both sides")
    add("--warmup", type=count, default=4, metavar="N", help="steps before the first that counts")
    add("--iterations", type=count, default=12, metavar="N", help="steps that count")
    add("--repeat", type=count, default=2, metavar="N", help="processes of each side, in turn; the median is shown")
    add("--tiny", action="store_true", help="small sizes, for a machine without a GPU")
    add("--json", type=Path, metavar="FILE", help="file to which one line is appended: machine, settings, all runs")
    add("--require", action="store_true",
        help=f"exit with 1 unless ours has {SPEED} x the tok/s in {MEMORY} x the memory, at 8192 tokens and 3 steps, "
        "and compiles nothing after warm-up")  # fmt: skip
    add("--side", choices=SIDES, help=argparse.SUPPRESS)  # in a child: measure this one and write --result
    add("--setting", help=argparse.SUPPRESS)
    add("--result", type=Path, help=argparse.SUPPRESS)
    return parser


def _counts(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


def _settings(options: argparse.Namespace) -> list[Setting]:
    names = ("supervised", "train_lm_head", "optimizer", "reference_loss")
    own = {name: getattr(options, name) for name in names}
    if options.tiny:
        return [replace(TINY, **own, steps=steps) for steps in options.steps]
    own |= {"warmup": options.warmup, "iterations": options.iterations}
    return [Setting(tokens=tokens, steps=steps, **own) for tokens, steps in product(options.tokens, options.steps)]


def _alternating(options: argparse.Namespace, setting: Setting) -> dict[str, list[Trained]]:
    sides = list(SIDES) if options.reference else ["aerie"]
    measured: dict[str, list[Trained]] = {side: [] for side in sides}
    for side in sides * options.repeat:
        print(f"bench  {side}, {setting.tokens:,} tokens, {setting.steps} steps", file=sys.stderr, flush=True)
        if trained := _in_child(options, side, setting):
            measured[side].append(trained)
    return measured


def _in_child(options: argparse.Namespace, side: str, setting: Setting) -> Trained | None:
    """None when it failed; its own error is on stderr then."""
    environment = dict(os.environ)
    if side != "aerie":
        paths = [str(options.reference), environment.get("PYTHONPATH")]
        environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    with tempfile.TemporaryDirectory(prefix="aerie-bench-") as folder:
        result = Path(folder) / "result.json"
        own = ["--side", side, "--setting", json.dumps(asdict(setting)), "--result", str(result)]
        done = subprocess.run(
            [sys.executable, "-m", "benchmarks.train", *own], env=environment, stdout=sys.stderr, check=False
        )
        if done.returncode or not result.is_file():
            print(f"bench  {side} FAILED with {done.returncode}, its own error is above", file=sys.stderr)
            return None
        return Trained(**json.loads(result.read_bytes()))


def _median(runs: list[Trained]) -> Trained:
    """The run of median speed; of an even number the slower one."""
    return sorted(runs, key=lambda run: -run.tokens_per_s)[len(runs) // 2]


def _ratios(sides: dict[str, Trained]) -> tuple[float, float] | None:
    """Ours over the other's: tok/s and peak memory."""
    if len(sides) < len(SIDES):
        return None
    ours, other = (sides[name] for name in SIDES)
    return ours.tokens_per_s / other.tokens_per_s, ours.peak_bytes / max(other.peak_bytes, 1)


def _is_met(sides: dict[str, Trained]) -> bool:
    ratios = _ratios(sides)
    return ratios is not None and ratios[0] >= SPEED and ratios[1] <= MEMORY and sides["aerie"].graphs[1] == 0


def _page(setting: Setting, sides: dict[str, Trained]) -> str:
    loss = f", the other side's loss {setting.reference_loss}" if "speculators" in sides else ""
    lines = [
        f"\n{setting.tokens:,} tokens a step, {setting.steps} TTT steps, {setting.supervised:.0%} supervised, "
        f"{setting.trained / 1e9:.3g} billion parameters trained by {setting.optimizer}{loss}",
        f"{'':12} {'tok/s':>8} {'TFLOP/s of everything':>22} {'done':>7} {'of the card':>12} {'peak GiB':>9} "
        f"{'graphs':>7} {'later':>6} {'slowest / median step':>22} {'first and last loss':>20}",
    ]
    for side, run in sides.items():
        per_s = run.tokens_per_s / setting.tokens / 1e12
        done = run.operations_done * per_s
        share = f"{done * 1e12 / run.matrix_rate:.2f}" if run.matrix_rate else "-"
        lines.append(
            f"{side:12} {run.tokens_per_s:8,.0f} {run.operations_all * per_s:22.1f} {done:7.1f} {share:>12} "
            f"{run.peak_bytes / 2**30:9.2f} {run.graphs[0]:7} {run.graphs[1]:6} "
            f"{max(run.step_s) / median(run.step_s):22.2f} {run.losses[0]:11.3f} {run.losses[-1]:8.3f}"
        )
    if ratios := _ratios(sides):
        lines.append(f"ours / speculators: {ratios[0]:.2f} x the tok/s, {ratios[1]:.2f} x the peak memory")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
