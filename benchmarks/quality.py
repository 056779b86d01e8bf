"""Benchmark of what is learnt: a run's draft beside the one that speculators 0.9.0's trainer makes of the same states.

    uv venv ENV && VIRTUAL_ENV=ENV uv pip install speculators==0.9.0
    python -m benchmarks.quality --reference ENV/bin/python                        # after `make demo`

Both see the same training samples equally often, can say the same words, have one layer of the same sizes, and are
chosen among their epochs by the same validation samples. The other trainer is run by its own command line with its
defaults, but for what the run decides (epochs, the aux layers, the words, TTT steps) and --row-tokens, the tokens of a
step: its default, 8,192, leaves it few steps where data are few, so the run's own `train.tokens_per_row` is taken as
well. benchmarks/reference_trainer.py says what it takes to run it without a GPU.

Then one vLLM serves both, greedily, on the run's held-out prompts, one at a time, with vLLM's own counters. Intervals
are 95 %, by bootstrap over prompts; that of a difference draws the same prompts for both. `validation` is each
trainer's own figure for its validation samples: a draft that vLLM loads wrongly keeps less of it than ours does.

Exit codes: 0 measured; 1 --require was not met; 2 wrong usage; others as those of the steps.
"""

import argparse
import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.command import Formatter, count, machine
from benchmarks.reference_data import convert, train_ratio
from pipeline.config import Run, load
from pipeline.errors import MismatchError, UserError
from pipeline.evaluate.counts import Counts, Outcome, interval
from pipeline.evaluate.step import question_of
from pipeline.evaluate.vllm_engine import VllmEngine
from pipeline.store import read_manifest
from pipeline.store.states import StatesReader
from pipeline.target import Target

SERVE_PYTHON = Path(".venv-serve/bin/python")
DRAWS = 2000


@dataclass(frozen=True)
class Trained:
    """A draft, and what it took to train it."""

    name: str
    folder: Path
    steps: int | None
    tokens: int
    """Seen in all epochs, each as often as it was seen."""
    seconds: float
    validation: float | None
    """Acceptance length on the validation samples, by its own trainer."""


def main(arguments: list[str] | None = None) -> int:
    """Measure. Returns the exit code."""
    options = _parser().parse_args(arguments)
    if not options.reference.is_file():
        print(f"bench: --reference {options.reference} is no Python: --help says how to make it", file=sys.stderr)
        return 2
    try:
        config = load(options.config)
        evaluate = config.evaluate.model_copy(
            update={"python": str(options.python), "batch_size": 1, "baseline": False}
        )
        config = config.model_copy(update={"evaluate": evaluate})
        target, reader = Target(config.target), StatesReader(config.folder("hidden"))
        drafts = [_ours(config), *_reference(options, config, reader)]
        question, _ = question_of(config, target)
        served = []
        for draft in drafts:
            print(f"bench  vLLM serves {draft.folder}", file=sys.stderr, flush=True)
            served.append(VllmEngine(config, target, draft.folder).answer(question))
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    print(page(drafts, served, config.seed))
    if options.json:
        facts = [
            {**vars(draft), "folder": str(draft.folder), "vllm": outcome.more["vllm"], **vars(outcome.total)}
            | {"each": [vars(counts) for counts in outcome.counts]}
            for draft, outcome in zip(drafts, served, strict=True)
        ]
        with options.json.open("a") as file:
            file.write(json.dumps({"benchmark": "quality", "machine": machine(), "drafts": facts}) + "\n")
    ours, *others = (outcome.total.acceptance_length for outcome in served)
    return 1 if options.require and ours < max(others) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.quality", description=__doc__, formatter_class=Formatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--config", type=Path, default=Path("configs/smollm2-135m.toml"), metavar="FILE", help="of a finished run")
    add("--reference", type=Path, required=True, metavar="PYTHON", help="of an environment with speculators 0.9.0")
    add("--python", type=Path, default=SERVE_PYTHON, metavar="PYTHON", help="of an environment whose vLLM serves both")
    add("--row-tokens", type=_counts, metavar="N,N",
        help="tokens of a step of the other trainer, a draft each (default: the run's and 8192)")  # fmt: skip
    add("--work", type=Path, default=Path("runs/bench-quality"), metavar="DIR",
        help="for the other side's data (as large as hidden/) and drafts; what is there stays")  # fmt: skip
    add("--json", type=Path, metavar="FILE", help="file to which one line is appended: machine, drafts, all counts")
    add("--require", action="store_true", help="exit with 1 unless ours has the highest acceptance length")
    return parser


def _counts(text: str) -> list[int]:
    return [count(part) for part in text.split(",")]


def _ours(config: Run) -> Trained:
    totals = read_manifest(config.folder("checkpoints"), "train").totals
    tokens = round(totals["tokens_per_second"] * totals["seconds"])
    best = config.folder("checkpoints") / "best"
    return Trained("ours", best, totals["steps"], tokens, totals["seconds"], totals["acceptance_length"])


def _reference(options: argparse.Namespace, config: Run, reader: StatesReader) -> list[Trained]:
    """Drafts of the other trainer, one for each length of a row."""
    data = options.work / "data"
    split = convert(config, reader, data)
    lengths = options.row_tokens or sorted({config.train.tokens_per_row, 8192})
    return [_train(options, config, data, split, reader, tokens) for tokens in lengths]


def _train(
    options: argparse.Namespace,
    config: Run,
    data: Path,
    split: tuple[list[int], list[int]],
    reader: StatesReader,
    row_tokens: int,
) -> Trained:
    folder, section = options.work / f"rows-of-{row_tokens}", config.train
    result, made_by = folder / "result.json", folder / "command.json"
    words = next(data.glob("d2t-*.npy")).stem.removeprefix("d2t-")
    given = {
        "verifier-name-or-path": Target(config.target).folder,
        "data-path": data,
        "save-path": folder,
        "log-dir": folder / "logs",
        "on-missing": "raise",
        "train-data-ratio": repr(train_ratio(len(split[0]), len(split[1]))),
        "draft-vocab-size": words,
        "epochs": section.epochs,
        "ttt-steps": section.ttt_steps,
        "total-seq-len": row_tokens,
    }
    flags = [text for name, value in given.items() for text in (f"--{name}", str(value))]
    layers = [str(layer) for layer in reader.manifest.totals["aux_layers"]]
    script = Path(__file__).with_name("reference_trainer.py")
    command = [str(options.reference), str(script), *flags, "--target-layer-ids", *layers]
    if not result.is_file():
        print(f"bench  speculators 0.9.0, rows of {row_tokens:,} tokens", file=sys.stderr, flush=True)
        folder.mkdir(parents=True, exist_ok=True)
        made_by.write_text(json.dumps(command))
        with (folder / "log.txt").open("w") as log:
            environment = {**os.environ, "RESULT": str(result), "HF_HUB_OFFLINE": "1"}
            done = subprocess.run(command, env=environment, stdout=log, stderr=log, check=False)
        if done.returncode or not result.is_file():
            raise UserError(f"bench: speculators ended with {done.returncode}: {folder / 'log.txt'}")
    if json.loads(made_by.read_text()) != command:
        raise MismatchError(f"bench: {folder} was made by another command. Give another --work; nothing was changed")
    best = (folder / "checkpoint_best").resolve()
    state = json.loads((folder / str(section.epochs - 1) / "training_state.json").read_text())
    metrics = json.loads((best / "val_metrics.json").read_text())
    facts = json.loads(result.read_text())
    tokens = int(reader.lengths_N[split[0]].sum()) * section.epochs
    name = f"speculators {facts['speculators']}, rows of {row_tokens:,}"
    return Trained(name, best, state["global_step"], tokens, facts["seconds"], validation_of(metrics))


def validation_of(metrics: dict[str, Any]) -> float:
    """Acceptance length from the trainer's `full_acc_K`: the share of indices where steps 0 to K all hit."""
    return 1 + sum(value for name, value in metrics.items() if name.startswith("full_acc_"))


def page(drafts: list[Trained], served: list[Outcome], seed: int) -> str:
    """A line a draft; then the others' differences from ours."""
    lines = [
        f"{'':32} {'acceptance length, 95 %':>27} {'by position':>21} {'validation':>10} {'tokens seen':>12} "
        f"{'steps':>6} {'seconds':>8}"
    ]
    for draft, outcome in zip(drafts, served, strict=True):
        low, high = interval(outcome.counts, seed) or (float("nan"),) * 2
        total = outcome.total
        length = f"{total.acceptance_length:.3f} ({low:.3f} to {high:.3f})"
        by_position = " / ".join(f"{share:.3f}" for share in total.acceptance_per_position)
        validation = "-" if draft.validation is None else f"{draft.validation:.3f}"
        lines.append(
            f"{draft.name:32} {length:>27} {by_position:>21} {validation:>10} {draft.tokens:12,} "
            f"{draft.steps or '-':>6} {draft.seconds:8.0f}"
        )
    for draft, outcome in list(zip(drafts, served, strict=True))[1:]:
        mean, low, high = difference(served[0].counts, outcome.counts, seed)
        lines.append(f"ours - {draft.name}: {mean:+.3f} ({low:+.3f} to {high:+.3f})")
    return "\n".join(lines)


def difference(ours: list[Counts], others: list[Counts], seed: int) -> tuple[float, float, float]:
    """Of two drafts' acceptance lengths on the same prompts, with the 95 % bootstrap interval over those prompts."""
    assert len(ours) == len(others), "other prompts"
    drafts, accepted = (
        np.array([[value(counts) for counts in side] for side in (ours, others)])
        for value in (lambda c: c.num_drafts, lambda c: sum(c.num_accepted_tokens_per_pos))
    )
    picks = np.random.default_rng(seed).integers(len(ours), size=(DRAWS, len(ours)))

    def lengths(picks: np.ndarray) -> np.ndarray:
        return accepted[:, picks].sum(-1) / np.maximum(drafts[:, picks].sum(-1), 1)

    mean, drawn = lengths(np.arange(len(ours))), lengths(picks)
    low, high = np.quantile(drawn[0] - drawn[1], [0.025, 0.975])
    return float(mean[0] - mean[1]), float(low), float(high)


if __name__ == "__main__":
    sys.exit(main())
