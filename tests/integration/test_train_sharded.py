"""Sharded training (train.sharding) against replicas and one process: losses, weights, moments, checkpoints, skips.

Two processes are started once for the module and train one run after the other, which the tests then look at. Sizes
are odd, so that parts are unequal. Where nothing is clipped, sharded and replicas agree to the bit: both add up two
gradients. A norm is added up in another order, and Muon's products of matrices.
"""

import contextlib
import json
import os
import shutil
import signal
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch._dynamo.utils import counters

from pipeline import vocab
from pipeline.__main__ import run_step
from pipeline.config import Run, load
from pipeline.errors import Stopped
from pipeline.store import Shard, finish, read_manifest
from pipeline.store.states import StatesReader
from pipeline.train import loop, loss, step
from pipeline.train.checkpoint import Progress
from pipeline.train.data import split_by_conversation
from pipeline.train.launch import HOST, launch
from pipeline.train.loop import Place
from pipeline.train.sharding import is_sharded
from tests.forecasting import make_trainer, small_run
from tests.integration.test_train import spoil
from tests.integration.test_train_resumed import at_step
from tests.models import Reference
from tests.training import make_hidden, write_config

TRAIN = {
    "epochs": 2, "learning_rate": 1e-3, "rows_per_step": 2, "tokens_per_row": 64, "validation_share": 0.2,
    "noise": 0.05, "checkpoint_steps": 2, "tracker": "tensorboard", "intermediate_size": 255, "keep_checkpoints": 100,
}  # fmt: skip
UNCLIPPED = {"clip_norm": 1e6}
KINDS: dict[str, dict[str, Any]] = {
    "rows": {"rows_per_step": 4, "epochs": 4, **UNCLIPPED},  # two a process
    "layers": {"num_layers": 2, **UNCLIPPED},
    "frozen": {"train_lm_head": False, **UNCLIPPED},
    "clipped": {"clip_norm": 0.5},
    "muon": {"optimizer": "muon", **UNCLIPPED},
    "skip": {"on_nonfinite": "skip", "checkpoint_steps": 1, **UNCLIPPED},
}
STOP = 2
"""A step that is stopped after; no checkpoint is due there."""


@dataclass(frozen=True)
class Task:
    """A run for the two processes: its configuration file and what is other in it."""

    path: str
    sharding: str
    stop: bool = False
    """At step STOP, by a signal that one of them gets."""
    port: int = 0
    """Of the store at which they find each other: one store has the addresses of one run."""


def train_all(tasks: str) -> None:
    """What each process does: one run after the other. Beside a run, `RANK.json` says what it kept and exchanged."""
    for task in (Task(**item) for item in json.loads(tasks)):
        os.environ["MASTER_PORT"] = str(task.port)
        config = load(Path(task.path), {"train": {"sharding": task.sharding}})
        with pytest.MonkeyPatch.context() as patch:
            if task.stop and os.environ["RANK"] == "1":
                at_step(patch, STOP, lambda: os.kill(os.getpid(), signal.SIGTERM))
            facts = watched(patch)
            with contextlib.suppress(Stopped):
                step.run(config)
        (config.runs_dir / f"{os.environ['RANK']}.json").write_text(json.dumps(facts))


def watched(patch: pytest.MonkeyPatch) -> dict[str, int]:
    """Numbers that the process keeps of weights and moments at its end, steps and exchanges of FSDP."""
    facts = {"kept": 0, "gathered": 0, "reduced": 0, "steps": 0, "validations": 0}

    def count(owner: Any, name: str, what: str) -> None:
        original = getattr(owner, name)

        def counted(*arguments: Any, **more: Any) -> Any:
            facts[what] += 1
            return original(*arguments, **more)

        patch.setattr(owner, name, counted)

    count(torch.distributed, "all_gather_into_tensor", "gathered")
    count(torch.distributed, "reduce_scatter_tensor", "reduced")
    count(loop.Trainer, "_step", "steps")
    count(loop.Trainer, "validate", "validations")
    original = loop.Trainer.run

    def run(self: loop.Trainer, *arguments: Any) -> None:
        try:
            original(self, *arguments)
        finally:
            states = [value for state in self.optimizer.state.values() for value in state.values()]
            facts["kept"] = sum(local(tensor).numel() for tensor in [*self.draft.parameters(), *states])

    patch.setattr(loop.Trainer, "run", run)
    return facts


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, llama_folder: Path) -> dict[str, Run]:
    """By KIND/none, KIND/full and KIND/one, and some that went on otherwise than they began."""
    folder, reference = tmp_path_factory.mktemp("sharded"), Reference(llama_folder)
    made: dict[str, Run] = {}

    def make(kind: str, name: str) -> str:
        made[f"{kind}/{name}"], path = make_run(folder / kind, name, llama_folder, reference, KINDS[kind])
        return path

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    tasks = [Task(make(kind, how), how) for kind in KINDS for how in ("none", "full")]
    tasks += [Task(make("rows", name), how, stop) for name, how, stop in (
        ("full-one", "full", True), ("none-full", "none", True), ("full-full", "full", True),
    )]  # fmt: skip
    tasks += [Task(str(task.path), "full") for task in tasks[-2:]]
    for kind in [kind for kind in KINDS if kind != "skip"]:
        make(kind, "one")
        assert run_step("train", made[f"{kind}/one"]) == 0
    make("rows", "one-full")
    with pytest.MonkeyPatch.context() as patch:
        at_step(patch, STOP, lambda: os.kill(os.getpid(), signal.SIGTERM))
        assert run_step("train", made["rows/one-full"]) == 143
    tasks.append(Task(str(made["rows/one-full"].runs_dir.parent / "run.toml"), "full"))
    stores = [torch.distributed.TCPStore(HOST, 0, is_master=True, wait_for_workers=False) for _ in tasks]
    tasks = [replace(task, port=store.port) for task, store in zip(tasks, stores, strict=True)]
    launch(2, train_all, json.dumps([asdict(task) for task in tasks]))
    assert run_step("train", made["rows/full-one"]) == 0
    signal.signal(signal.SIGINT, before)
    return made


def make_run(folder: Path, name: str, target: Path, reference: Reference, train: dict[str, Any]) -> tuple[Run, str]:
    """A run whose states are there; those of one kind are alike."""
    place = folder / name
    place.mkdir(parents=True)
    path = write_config(
        place / "run.toml",
        target,
        train={**TRAIN, **train, "processes": 1},
        target={"max_length": 64},
        vocab={"draft_vocab_size": 279},
    )
    config, first = load(path), folder / "runs"
    if first.is_dir():
        shutil.copytree(first, config.runs_dir)
        return config, str(path)
    random = np.random.default_rng(0)
    prompts = [random.integers(0, 256, 4 + i % 9).tolist() for i in range(21)]
    make_hidden(config, reference, prompts, [random.integers(0, 256, 20).tolist() for _ in prompts])
    vocab.run(config)
    if train.get("on_nonfinite") == "skip":
        spoil_one(config)
    shutil.copytree(config.runs_dir, first)
    return config, str(path)


def spoil_one(config: Run) -> None:
    folder = config.folder("hidden")
    reader = StatesReader(folder)
    spoil(reader, split_by_conversation(reader.conversation_ids, config.train.validation_share, config.seed)[0][3])
    manifest = reader.manifest
    shards = [Shard.describe(folder / shard.file, shard.samples, shard.tokens) for shard in manifest.shards]
    finish(folder, "extract", manifest.inputs, shards, manifest.totals)


def states(config: Run) -> dict[str, torch.Tensor]:
    """Weights, steps and moments at the end."""
    return load_file(config.folder("checkpoints") / "last/trainer/state.safetensors")


def curve(config: Run, name: str) -> list[float]:
    """As TensorBoard shows it, of runs that were stopped, too."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    values: dict[int, float] = {}
    for file in sorted((config.folder("checkpoints") / "logs").iterdir(), key=lambda path: path.stat().st_mtime_ns):
        events = EventAccumulator(str(file))
        events.Reload()
        values |= {event.step: event.value for event in events.Scalars(f"train/{name}")}
    return [value for _, value in sorted(values.items())]


def losses(config: Run) -> list[float]:
    return curve(config, "loss")


def facts_of(config: Run) -> list[dict[str, int]]:
    return [json.loads((config.runs_dir / f"{rank}.json").read_text()) for rank in (0, 1)]


def metrics(config: Run) -> dict[str, float]:
    """Of the last validation."""
    return json.loads((config.folder("checkpoints") / "last/trainer/progress.json").read_text())["metrics"]


def assert_same_bits(one: Run, two: Run) -> None:
    assert losses(one) == losses(two)
    assert states(one).keys() == states(two).keys()
    for name, tensor in states(one).items():
        assert torch.equal(tensor, states(two)[name]), name
    assert metrics(one) == metrics(two)


def assert_near(one: Run, two: Run) -> None:
    np.testing.assert_allclose(losses(one), losses(two), rtol=2e-4)
    assert states(one).keys() == states(two).keys()
    for name, tensor in states(one).items():
        if name.startswith("weight/"):
            torch.testing.assert_close(states(two)[name], tensor, rtol=1e-2, atol=2e-3)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in {"clipped", "muon"}])
def test_sharded_training_is_that_of_replicas_to_the_bit(runs, kind):
    assert len(losses(runs[f"{kind}/full"])) >= 5
    assert_same_bits(runs[f"{kind}/full"], runs[f"{kind}/none"])


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "skip"])
def test_two_sharded_processes_train_as_one(runs, kind):
    assert_near(runs[f"{kind}/full"], runs[f"{kind}/one"])


def test_muon_on_parts_trains_as_on_whole_matrices(runs):
    """Not to the bit: Newton-Schulz computes in bfloat16, on parts in another order, and brings up what is small."""
    whole = states(runs["muon/none"])
    assert any(name.startswith("momentum_buffer/") for name in whole)
    assert_near(runs["muon/full"], runs["muon/none"])
    for name, tensor in states(runs["muon/full"]).items():
        assert (tensor - whole[name]).norm() < 5e-3 * whole[name].norm(), name


def test_gradients_are_clipped_by_the_norm_of_all_parts(runs):
    clipped, replicas = runs["clipped/full"], runs["clipped/none"]
    norms = curve(clipped, "gradient_norm")
    assert min(norms) > clipped.train.clip_norm, "nothing is clipped"
    np.testing.assert_allclose(norms, curve(replicas, "gradient_norm"), rtol=1e-4)
    np.testing.assert_allclose(losses(clipped), losses(replicas), rtol=1e-5)
    first = clipped.folder("checkpoints") / "step-00000002/trainer/state.safetensors"
    there = load_file(replicas.folder("checkpoints") / "step-00000002/trainer/state.safetensors")
    for name, tensor in load_file(first).items():  # AdamW hides a factor of all gradients, its moments do not
        torch.testing.assert_close(tensor, there[name], rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("kind", KINDS)
def test_a_process_keeps_its_part_only(runs, kind):
    """Of a replica's moments Muon's are shared out as well."""
    whole = sum(tensor.numel() for tensor in states(runs[f"{kind}/none"]).values())
    replicas, parts = ([facts["kept"] for facts in facts_of(runs[f"{kind}/{how}"])] for how in ("none", "full"))
    assert max(replicas) < 0.8 * whole if kind == "muon" else set(replicas) == {whole}
    assert max(parts) < 0.51 * whole


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_gathers_and_reduces_once_however_many_rows_it_has(runs, kind):
    """And a validation gathers once."""
    for facts in facts_of(runs[f"{kind}/full"]):
        assert facts["steps"] > 0 < facts["validations"]
        assert facts["reduced"] == facts["steps"]
        assert facts["gathered"] == facts["steps"] + facts["validations"]
    assert not any(facts["gathered"] + facts["reduced"] for facts in facts_of(runs[f"{kind}/none"]))


def test_a_stopped_run_goes_on_to_the_same_bits(runs):
    """Whether it was sharded before, after, or both: replicas do the same sums."""
    for name in ("full-full", "none-full"):
        config = runs[f"rows/{name}"]
        assert (config.folder("checkpoints") / f"step-{STOP + 1:08d}").is_dir()
        assert_same_bits(config, runs["rows/full"])


@pytest.mark.parametrize("name", ["full-one", "one-full"])
def test_one_process_goes_on_with_a_sharded_run_and_the_other_way_round(runs, name):
    assert (runs[f"rows/{name}"].folder("checkpoints") / f"step-{STOP + 1:08d}").is_dir()
    assert_near(runs[f"rows/{name}"], runs["rows/full"])


def test_the_files_are_those_of_replicas(runs):
    """Also for a program that reads them: names, shapes and dtypes."""
    layouts = [
        {
            (path.relative_to(folder).as_posix(), key, tensor.shape, tensor.dtype)
            for path in folder.rglob("*.safetensors")
            for key, tensor in load_file(path).items()
        }
        for how in ("full", "none")
        for folder in [(runs[f"layers/{how}"].folder("checkpoints") / "last").resolve()]
    ]
    assert layouts[0] == layouts[1]


def test_a_skipped_step_leaves_the_parts_as_they_were(runs):
    folder = runs["skip/full"].folder("checkpoints")
    assert read_manifest(folder, "train").totals["skipped_steps"] == runs["skip/full"].train.epochs
    progress = [json.loads(path.read_text()) for path in sorted(folder.glob("step-*/trainer/progress.json"))]
    skipped = [two["step"] for one, two in pairwise(progress) if two["skipped"] > one["skipped"]]
    assert skipped, "the first step is the only one: nothing is compared"
    for number in skipped:
        before, after = (load_file(folder / f"step-{n:08d}/trainer/state.safetensors") for n in (number - 1, number))
        assert before.keys() == after.keys()
        assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


def train_compiled(folder: str) -> None:
    """What each process does: train replicas as they are, and sharded and compiled. `RANK.json`: numbers, graphs."""
    place = Place(int(os.environ["RANK"]), 2, torch.device("cpu"))
    torch.distributed.init_process_group("gloo")
    loss.CHUNK_ROWS = 300
    train = {"tokens_per_row": 256, "autocast": False, "epochs": 1, "checkpoint_steps": 2, "ttt_steps": 2}
    (own := Path(folder, str(place.rank))).mkdir()
    numbers: tuple[list[float], list[float]] = ([], [])
    for sharded in (False, True):
        torch.manual_seed(0)
        trainer = make_trainer(*small_run(own, **train), place, sharded=sharded)
        if sharded:
            trainer.compile("aot_eager")
        graphs = counters["stats"]["unique_graphs"]
        trainer.run(Progress(), lambda _: None, lambda _, metrics, __, to=numbers[sharded]: to.extend(
            metrics[name] for name in ("loss", "gradient_norm") if name in metrics
        ))  # fmt: skip
    facts = {"numbers": numbers, "compiled": graphs, "in all": counters["stats"]["unique_graphs"]}
    Path(folder, f"{place.rank}.json").write_text(json.dumps(facts))
    torch.distributed.destroy_process_group()


def test_the_compiled_draft_is_one_graph_with_gathered_weights(tmp_path):
    """Made once: whether weights are in parts between two steps does not show in it."""
    launch(2, train_compiled, str(tmp_path))
    for rank in (0, 1):
        facts = json.loads((tmp_path / f"{rank}.json").read_text())
        plain, compiled = facts["numbers"]
        assert len(plain) == len(compiled) == 5, "losses and norms of two steps, the loss of a validation"
        assert compiled == pytest.approx(plain, rel=1e-5)
        assert 0 < facts["compiled"] == facts["in all"]


@pytest.mark.parametrize(
    ("sharding", "processes", "fits", "wanted"),
    [
        ("auto", 8, True, False), ("auto", 8, False, True), ("auto", 1, False, False), ("full", 1, False, False),
        ("full", 2, True, True), ("none", 8, False, False),
    ],
)  # fmt: skip
def test_what_is_sharded(sharding, processes, fits, wanted):
    assert is_sharded(sharding, processes, lambda: fits) is wanted
