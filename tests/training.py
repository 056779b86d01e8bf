"""A run's folders up to hidden/ and vocab/, made from the target in transformers: training tests need no engine."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from pipeline import vocab
from pipeline.config import Run, load
from pipeline.store import claim, finish
from pipeline.store.samples import Sample, write_samples
from pipeline.store.states import write_states
from pipeline.target import Target
from tests.models import Reference

AUX_LAYERS = (2, 4, 6)
Answers = tuple[Reference, list[list[int]], list[list[int]]]
"""The target, prompts, and its answers."""


def write_config(path: Path, target_folder: Path, **sections: dict[str, Any]) -> Path:
    """A configuration file for the tiny Llama; `sections` add and override."""
    values: dict[str, dict[str, Any]] = {
        "target": {"path": str(target_folder), "dtype": "float32", "max_length": 256},
        "prepare": {"sources": ["none.jsonl"]},
        "extract": {"aux_layers": list(AUX_LAYERS)},
        "vocab": {"draft_vocab_size": 280},
        "train": {"tokens_per_row": 256, "autocast": False, "tracker": "none", "threads": 1},
    }
    for name, section in sections.items():
        values.setdefault(name, {}).update(section)
    lines = ['name = "test"', f'runs_dir = "{path.parent / "runs"}"']
    for name, section in values.items():
        lines.append(f"[{name}]")
        lines += [f"{key} = {_toml(value)}" for key, value in section.items()]
    path.write_text("\n".join(lines) + "\n")
    return path


def _toml(value: Any) -> str:
    return (
        str(value).lower() if isinstance(value, bool) else repr(value) if not isinstance(value, str) else f'"{value}"'
    )


def greedy_answers(reference: Reference, prompts: list[list[int]], length: int) -> list[list[int]]:
    """What the target says to each prompt, greedily and without an end."""
    answers = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        written = reference._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=length,
            eos_token_id=None,
            pad_token_id=0,
        )
        answers.append(written[0, len(prompt) :].tolist())
    return answers


def make_hidden(config: Run, reference: Reference, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """prepared/ and hidden/ of a run; the last states are taken before the final norm, as the engine gives them."""
    samples = []
    for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
        ids = np.array(prompt + answer, dtype=np.int32)
        samples.append(Sample(f"s{number}", f"c{number}", ids, np.arange(len(ids)) >= len(prompt)))
    folder = config.folder("prepared")
    claim(folder, "prepare", {"test": len(samples)})
    finish(folder, "prepare", {"test": len(samples)}, [write_samples(folder / "samples-00000.parquet", samples)], {})

    states = [reference.states(sample.input_ids_S.tolist()) for sample in samples]
    aux = torch.cat([torch.stack([s[layer] for layer in AUX_LAYERS], dim=1) for s in states])
    last = torch.cat([s[reference.num_layers] for s in states])
    folder = config.folder("hidden")
    inputs = {"target": Target(config.target).fingerprint, "aux_layers": list(AUX_LAYERS)}
    claim(folder, "extract", inputs)
    from pipeline.store import run_key

    shard = write_states(
        folder / "shard-00000.safetensors",
        samples,
        aux,
        last,
        aux_layers=list(AUX_LAYERS),
        last_layer=reference.num_layers,
        run_key=run_key(inputs),
        store_dtype=config.extract.store_dtype,
    )
    totals = {"aux_layers": list(AUX_LAYERS), "hidden_size": aux.shape[-1], "dtype": "float32"}
    finish(folder, "extract", inputs, [shard], totals)


def prepared_run(folder: Path, target_folder: Path, answers: Answers, train: dict[str, Any]) -> tuple[Path, Run]:
    """A run up to vocab/: the path of its configuration, and what that says."""
    path = write_config(folder / "run.toml", target_folder, train=train, target={"max_length": 128})
    config = load(path)
    make_hidden(config, *answers)
    vocab.run(config)
    return path, config


def make_answers(target_folder: Path, prompts: int, length: int) -> Answers:
    """The target, prompts of 4 to 12 random ids, and what it says to each."""
    reference = Reference(target_folder)
    ids = [np.random.default_rng(i).integers(0, 256, 4 + i % 9).tolist() for i in range(prompts)]
    return reference, ids, greedy_answers(reference, ids, length)


def curve(config: Run, name: str) -> list[float]:
    """A curve of a run that was not interrupted."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(config.folder("checkpoints") / "logs"))
    events.Reload()
    return [event.value for event in events.Scalars(f"train/{name}")]


def best_weights(config: Run) -> dict[str, torch.Tensor]:
    """The draft's, as vLLM loads them."""
    return load_file(config.folder("checkpoints") / "best" / "model.safetensors")
