"""What each step of a run has made, and what the draft is worth.

    python -m pipeline report --config configs/smollm2-135m.toml

Reads the manifests and nothing else. A step that is not finished is shown as such, with what to do; a manifest that
cannot be used is named, and makes the exit code 4, like a run of which there is nothing at all.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.config import Run
from pipeline.errors import InputError
from pipeline.progress import clock
from pipeline.store import Manifest, read_manifest

FOLDERS = {
    "prepare": "prepared",
    "extract": "hidden",
    "vocab": "vocab",
    "train": "checkpoints",
    "evaluate": "evaluation",
}
"""The steps in the order of the data, and the folder of each."""
SHOWN = {
    "prepare": {"samples", "supervised_tokens", "rejected"},
    "extract": {"size_bytes"},
    "vocab": {"coverage", "draft_vocab_size"},
    "train": {"steps", "tokens_per_second", "seconds", "acceptance_length"},
    "evaluate": {"acceptance_length", "acceptance_length_95", "acceptance_per_position", "num_speculative_tokens",
                 "num_prompts", "engine", "seconds"},
}  # fmt: skip
"""The totals of each step that the table shows: a manifest without them is not one of this version."""
MADE_FROM = (
    ("extract", "prepared", "prepare"),
    ("vocab", "prepared", "prepare"),
    ("train", "hidden", "extract"),
    ("train", "vocab", "vocab"),
    ("evaluate", "train", "train"),
)
"""A step, the name in its inputs under which it keeps a predecessor's run key, the predecessor."""


@dataclass(frozen=True)
class Step:
    """One step of a run: its manifest, or why there is none. `unusable` is an error line for a broken manifest."""

    name: str
    folder: Path
    manifest: Manifest | None = None
    unusable: str = ""

    @property
    def totals(self) -> dict[str, Any]:
        """What the manifest says; empty for a step that is not done."""
        return self.manifest.totals if self.manifest else {}

    @property
    def begun(self) -> bool:
        """Whether the step left a plan: it was stopped, or is at work."""
        return (self.folder / "plan.json").is_file()

    @property
    def missing(self) -> str:
        """Why there is no manifest and what to do; empty for a step that is done."""
        if self.manifest:
            return ""
        if self.unusable:
            return f"unknown: {self.folder / 'manifest.json'} cannot be used"
        command = f"run `python -m pipeline {self.name}` with this --config"
        return f"begun, not done: {command}" if self.begun else f"not done: {command}"


def run(config: Run) -> None:
    """Print the report. Raises InputError when nothing was made yet, or when a manifest cannot be used."""
    steps = read_steps(config)
    if not any(step.manifest or step.unusable or step.begun for step in steps.values()):
        place = config.runs_dir / config.name
        raise InputError(f"report: {place} holds no step's output yet. Run `python -m pipeline prepare` first")
    print(table(config, steps))
    if broken := [step.unusable for step in steps.values() if step.unusable]:
        raise InputError("\n".join(f"report: {line}" for line in broken))


def read_steps(config: Run) -> dict[str, Step]:
    """The state of every step of the run, in order."""
    return {name: _read_step(name, config.folder(folder)) for name, folder in FOLDERS.items()}


def _read_step(name: str, folder: Path) -> Step:
    path = folder / "manifest.json"
    try:
        if not path.is_file():
            return Step(name, folder)
        manifest = read_manifest(folder, name)
        lacking = sorted(SHOWN[name] - set(manifest.totals))
    except InputError as error:
        return Step(name, folder, unusable=str(error))
    except OSError as error:
        return Step(name, folder, unusable=f"{name}: {path} cannot be read ({error.strerror})")
    if lacking:
        text = f"{name}: {path} does not say {', '.join(lacking)}. Remove the folder, run {name} again"
        return Step(name, folder, unusable=text)
    return Step(name, folder, manifest)


def table(
    config: Run, steps: dict[str, Step], seconds: float | None = None, seconds_of: dict[str, float] | None = None
) -> str:
    """What was made, what it is worth and where it lies: a title, then a fact a line.

    `seconds` and `seconds_of` are what the whole and each step took, where the caller measured it (the demo); without
    them the times that training and evaluation keep in their manifests are shown.
    """
    rows = [*_data_rows(steps), *_draft_rows(steps)]
    if seconds_of is None:
        rows += _speed(steps["evaluate"]) + _other_predecessors(steps)
        seconds_of = {name: step.totals["seconds"] for name, step in steps.items() if "seconds" in step.totals}
    if seconds_of:
        rows.append(("time", ", ".join(f"{name} {clock(seconds_of[name])}" for name in steps if name in seconds_of)))
    layers = f"{config.train.num_layers} layer{'s' if config.train.num_layers > 1 else ''}"
    words = steps["vocab"].totals.get("draft_vocab_size", config.vocab.draft_vocab_size)
    title = f"{Path(config.target.path).name}, draft of {layers}, {words:,} words"
    first = title if seconds is None else f"{title:<72}{clock(seconds)}"
    return "\n".join([first, *(f"  {name:<18} {value}" for name, value in rows)])


Rows = list[tuple[str, str]]


def _data_rows(steps: dict[str, Step]) -> Rows:
    prepare, extract, vocab = steps["prepare"], steps["extract"], steps["vocab"]
    rows: Rows = [("samples", prepare.missing)]
    if prepare.manifest:
        prepared = prepare.totals
        rejected = f"({sum(prepared['rejected'].values()):,} rejected: {prepare.folder / 'rejected.jsonl'})"
        rows = [("samples", f"{prepared['samples']:,}   {rejected}")]
        share = f"   {vocab.totals['coverage']:.1%} inside the draft vocabulary" if vocab.manifest else ""
        rows.append(("supervised tokens", f"{prepared['supervised_tokens']:,}{share}"))
    if extract.manifest:
        stored = f" in {extract.totals['store_dtype']}" if "store_dtype" in extract.totals else ""
        rows.append(("hidden states", f"{extract.totals['size_bytes'] / 1e9:.2f} GB{stored}   {extract.folder}"))
    else:
        rows.append(("hidden states", extract.missing))
    return rows if vocab.manifest else [*rows, ("draft vocabulary", vocab.missing)]


def _draft_rows(steps: dict[str, Step]) -> Rows:
    train, evaluate = steps["train"], steps["evaluate"]
    trained, result = train.totals, evaluate.totals
    rows: Rows = [("training", train.missing)]
    if train.manifest:
        rate = f"{trained['tokens_per_second']:,.0f} tok/s"
        rows = [("training", f"{trained['steps']:,} steps, {rate}   {train.folder}")]
    if evaluate.manifest:
        low, high = result["acceptance_length_95"] or (float("nan"),) * 2
        positions = " / ".join(f"{share:.2f}" for share in result["acceptance_per_position"])
        length = f"{result['acceptance_length']:.2f} of {result['num_speculative_tokens'] + 1}"
        rows.append(("acceptance length", f"{length}   (95 %: {low:.2f} to {high:.2f}; by position {positions})"))
        rows.append(("", f"{result['num_prompts']} held-out prompts, {result['engine']} engine"))
    else:
        rows.append(("acceptance length", evaluate.missing))
        if (value := trained.get("acceptance_length")) is not None:
            rows.append(("", f"{value:.2f} on validation samples, while training"))
    if train.manifest:
        rows.append(("draft", str(train.folder / "best")))
    return [*rows, ("summary", str(evaluate.folder / "summary.json"))] if evaluate.manifest else rows


def _speed(evaluate: Step) -> Rows:
    result = evaluate.totals
    if "tokens_per_second" not in result:
        return []
    text = f"{result['tokens_per_second']:.1f} tok/s"
    if "speedup" in result:
        alone = f"{result['tokens_per_second_without_draft']:.1f} tok/s without the draft"
        text += f", {alone} ({result['speedup']:.2f} x)"
    return [("speed", text)]


def _other_predecessors(steps: dict[str, Step]) -> Rows:
    """A folder that was made again after its successor: the successor's figures are not about it."""
    rows: Rows = []
    for name, key, predecessor in MADE_FROM:
        step, source = steps[name], steps[predecessor]
        if step.manifest and source.manifest and step.manifest.inputs.get(key) != source.manifest.run_key:
            rows.append(("note", f"{step.folder} was made from another {source.folder.name}/ than the one there now"))
    return rows
