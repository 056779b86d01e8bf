"""The step itself: prompts to ids, an engine's answer, summary.json and a table."""

import sys
import time
from pathlib import Path
from typing import Any

from pipeline import engine
from pipeline.config import Run
from pipeline.errors import ConfigError, InputError
from pipeline.evaluate.counts import Engine, Outcome, Question, interval
from pipeline.prepare.conversations import conversations
from pipeline.prepare.rejects import Rejection
from pipeline.prepare.render import Renderer
from pipeline.prepare.sources import open_sources
from pipeline.store import Shard, claim, exclusive, file_sha256, finish, read_manifest, verify, write_json
from pipeline.target import Target


def run(config: Run) -> None:
    """Measure the draft of a run on its held-out prompts, or say what was measured already.

    Raises ConfigError without prompts, InputError for an unfinished draft or prompts that cannot be used.
    """
    folder, checkpoints = config.folder("evaluation"), config.folder("checkpoints")
    draft_folder = checkpoints / "best"
    trained = read_manifest(checkpoints, "train")
    target = Target(config.target)
    engine_name = _engine_name(config)
    question, rejected = question_of(config, target)
    with exclusive(folder, "evaluate"):
        inputs = _inputs(config, target, trained.run_key, engine_name)
        if done := claim(folder, "evaluate", inputs, resumes=False):
            verify(folder, done)
            print(
                f"evaluate  already done: {folder / 'summary.json'}, acceptance length "
                f"{done.totals['acceptance_length']:.3f}"
            )
            return
        begun = time.monotonic()
        outcome = _engine(engine_name, config, target, draft_folder).answer(question)
        summary = summarise(outcome, question, engine_name, config.seed)
        summary |= {
            "num_rejected_prompts": rejected,
            "draft": str(draft_folder),
            "seconds": round(time.monotonic() - begun, 1),
        }
        write_json(folder / "summary.json", summary)
        write_json(folder / "answers.json", outcome.answers)
        files = [Shard.describe(folder / name, len(question.prompts), 0) for name in ("summary.json", "answers.json")]
        finish(folder, "evaluate", inputs, files, summary)
        print(table(summary))
        print(f"evaluate  {folder / 'summary.json'}")


def _inputs(config: Run, target: Target, train_key: str, engine_name: str) -> dict[str, Any]:
    """Everything that changes what is measured."""
    inputs = {
        "train": train_key,
        "target": target.fingerprint,
        "tokenizer": target.tokenizer_fingerprint,
        "thinking": config.target.thinking,
        "engine": engine_name,
        "prompts": [file_sha256(_existing(path)) for path in config.evaluate.prompts],
        "seed": config.seed,
        **config.evaluate.model_dump(mode="json", exclude={"prompts", "engine"}),
    }
    if engine_name == "vllm":
        inputs["vllm"] = engine.identity(config.evaluate.python)
    return inputs


def summarise(outcome: Outcome, question: Question, engine: str, seed: int) -> dict[str, Any]:
    """The content of summary.json. Counters have vLLM's names and meaning; lengths include the bonus token."""
    total = outcome.total
    return {
        "engine": engine,
        "acceptance_length": total.acceptance_length,
        "acceptance_length_95": interval(outcome.counts, seed),
        "acceptance_per_position": total.acceptance_per_position,
        "num_speculative_tokens": question.num_speculative_tokens,
        "num_drafts": total.num_drafts,
        "num_draft_tokens": total.num_drafts * question.num_speculative_tokens,
        "num_accepted_tokens": sum(total.num_accepted_tokens_per_pos),
        "num_accepted_tokens_per_pos": total.num_accepted_tokens_per_pos,
        "num_prompts": len(question.prompts),
        "num_output_tokens": total.output_tokens,
        "temperature": question.temperature,
        **outcome.more,
    }


def table(summary: dict[str, Any]) -> str:
    """The summary for a person: one fact a line."""
    decoding = "greedy" if summary["temperature"] == 0 else f"temperature {summary['temperature']}"
    interval_ = summary["acceptance_length_95"]
    most = summary["num_speculative_tokens"] + 1
    lines = [
        ("engine", f"{summary['engine']}, {summary['num_prompts']} held-out prompts, {decoding}"),
        (
            "acceptance length",
            f"{summary['acceptance_length']:.3f} of {most}"
            + (f"   (95 %: {interval_[0]:.2f} to {interval_[1]:.2f})" if interval_ else ""),
        ),
        ("by position", " / ".join(f"{share:.1%}" for share in summary["acceptance_per_position"])),
        ("counted", f"{summary['num_drafts']:,} drafts, {summary['num_accepted_tokens']:,} tokens accepted"),
    ]
    if "tokens_per_second" in summary:
        speed = f"{summary['tokens_per_second']:.1f} tok/s"
        if "speedup" in summary:
            alone = summary["tokens_per_second_without_draft"]
            speed += f", {alone:.1f} tok/s without the draft ({summary['speedup']:.2f} x)"
        lines.append(("speed", speed))
    return "\n".join(f"  {name:<18} {value}" for name, value in lines)


def question_of(config: Run, target: Target) -> tuple[Question, int]:
    """The held-out prompts as ids, and how many could not be used."""
    section = config.evaluate
    if not section.prompts:
        raise ConfigError("evaluate: evaluate.prompts is empty. Name a JSONL file of held-out prompts")
    files = [str(_existing(path)) for path in section.prompts]
    rows = (row for source in open_sources(files) for row in source.rows())
    rendered = list(Renderer.of(target).prompts(conversations(rows, True)))
    rejected = [item for item in rendered if isinstance(item, Rejection)]
    for item in rejected:
        print(f"evaluate  left out: {item.source}, line {item.row}: {item.reason}", file=sys.stderr)
    ids = [item.input_ids for item in rendered if not isinstance(item, Rejection)][: section.limit]
    if not ids:
        raise InputError(f"evaluate: {', '.join(section.prompts)}: no prompt that can be used")
    longest = max(map(len, ids))
    room = target.config.get("max_position_embeddings")
    if room is not None and longest + section.max_new_tokens > room:
        raise InputError(
            f"evaluate: a prompt of {longest} tokens and {section.max_new_tokens} new ones do not fit "
            f"the target's {room} positions"
        )
    question = Question(
        ids,
        target.end_of_turn_ids,
        section.num_speculative_tokens,
        section.max_new_tokens,
        section.temperature,
        config.seed,
    )
    return question, len(rejected)


def _existing(path: str) -> Path:
    if not Path(path).is_file():
        raise InputError(f"evaluate: {path}: no such file. Set evaluate.prompts")
    return Path(path)


def _engine_name(config: Run) -> str:
    if config.evaluate.engine != "auto":
        return config.evaluate.engine
    import torch

    return "vllm" if torch.cuda.is_available() or config.evaluate.python else "reference"


def _engine(name: str, config: Run, target: Target, draft_folder: Path) -> Engine:
    if name == "vllm":
        from pipeline.evaluate.vllm_engine import VllmEngine

        return VllmEngine(config, target, draft_folder)
    from pipeline.evaluate.reference import ReferenceEngine

    return ReferenceEngine(target, draft_folder)
