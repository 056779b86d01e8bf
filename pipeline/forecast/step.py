"""The step `forecast`: collects the facts and prints them, a fact a line."""

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from pipeline.config import Run
from pipeline.errors import InputError
from pipeline.extract.stream import bounds
from pipeline.forecast import disk
from pipeline.forecast.data import Data, data_of
from pipeline.forecast.engine_memory import GIB, EngineMemory, engine_memory
from pipeline.forecast.shapes import Shapes, target_shapes
from pipeline.forecast.traffic import all_reduce, broadcast_s
from pipeline.forecast.training import AUX_LAYERS, TrainingMemory, fits, sharded_memory, training_memory
from pipeline.forecast.weights import TargetWeights, target_weights
from pipeline.preflight.inputs import STATES_PER_TOKEN
from pipeline.prepare.regenerate import BATCHED_TOKENS
from pipeline.progress import clock
from pipeline.store.dtypes import Stored, stored_dtype
from pipeline.target import Target
from pipeline.train.checkpoint import snapshot_bytes
from pipeline.train.data import pinned_row_bytes
from pipeline.train.loop import VALIDATION_AHEAD
from pipeline.train.sharding import is_sharded

Rows = list[tuple[str, str]]
PUBLISHED_RATES_OF = "kimi_k25"
"""The model type that [forecast]'s default rates are of."""
EXTRACT_REACHED = {"stream": "engine stream reached 96 %", "speculators": "speculators 0.3.0 as released reached 15 %"}
"""Of the prefill rate, a Llama of 8 B parameters on one H200, vLLM 0.16.0, 2026-11-30: 40,900 of 42,400 tok/s; with
its API breaks mended 6,500 of 43,200. Our patched one has not been measured there."""


@dataclass
class Forecast:
    """The facts of one run. `unfit` collects what does not fit, in a word each."""

    config: Run
    shapes: Shapes
    data: Data
    weights: TargetWeights
    unfit: list[str] = field(default_factory=list)

    @property
    def target(self) -> Target:
        """The target, of which the configuration can be read and perhaps nothing else."""
        return self.shapes.target

    @property
    def stored(self) -> Stored:
        """As what hidden/ holds the states."""
        return stored_dtype(self.config.target.dtype, self.config.extract.store_dtype)

    @cached_property
    def processes(self) -> int:
        """Training processes, as pipeline.train.launch chooses them on the machine that is described."""
        section = self.config.train
        return section.processes or min(self.config.forecast.gpu_count, section.rows_per_step)

    @cached_property
    def training(self) -> TrainingMemory:
        """Memory of a GPU in training, with a replica in each process."""
        return training_memory(self.config, self.target, self.processes)

    @cached_property
    def sharded(self) -> bool:
        """Whether training is sharded, as pipeline.train.step chooses on the machine that is described."""
        have = self.config.forecast.gpu_memory_gib * GIB
        return is_sharded(self.config.train.sharding, self.processes, lambda: fits(self.training, self.config, have))

    @property
    def train_tokens(self) -> int:
        """Tokens of one epoch."""
        return round(self.data.tokens * (1 - self.config.train.validation_share))

    @property
    def steps(self) -> int:
        """Optimiser steps of all epochs, rows taken as full."""
        section = self.config.train
        return section.epochs * math.ceil(self.train_tokens / section.tokens_per_row / section.rows_per_step)

    def done(self, folder: str) -> bool:
        """Whether a step has finished its folder."""
        return (self.config.folder(folder) / "manifest.json").is_file()

    def verdict(self, name: str, need: float, have: float) -> str:
        """`fits` or `does not fit`, which is remembered."""
        if need <= have:
            return "fits"
        self.unfit.append(name)
        return "DOES NOT FIT"


def run(config: Run) -> None:
    """Print the forecast. Raises InputError, naming it, when something does not fit."""
    shapes = target_shapes(config.target)
    facts = Forecast(config, shapes, data_of(config), target_weights(shapes))
    print(_title(facts))
    for heading, rows in (
        ("", _input_rows(facts)),
        ("disk", _disk_rows(facts)),
        ("hours", _hour_rows(facts)),
        (_memory_heading(facts), _memory_rows(facts)),
        ("memory of the machine", _host_rows(facts)),
    ):
        if rows:
            print("\n".join([heading] * bool(heading) + [f"  {name:<18} {value}" for name, value in rows]))
    if facts.unfit:
        raise InputError(f"forecast: does not fit: {', '.join(dict.fromkeys(facts.unfit))}")


def _title(facts: Forecast) -> str:
    config = facts.config
    layers = f"{config.train.num_layers} layer{'s' if config.train.num_layers > 1 else ''}"
    words = min(config.vocab.draft_vocab_size, facts.target.vocab_size)
    return f"{Path(config.target.path).name}, draft of {layers}, {words:,} words: forecast of run {config.name}"


def _input_rows(facts: Forecast) -> Rows:
    target, data = facts.target, facts.data
    mean = data.tokens / max(1, data.samples)
    source = f"counted in {data.counted}" if data.counted else "assumed: forecast.samples, forecast.tokens_per_sample"
    return [
        (
            "target",
            f"{target.num_layers} layers, hidden size {target.hidden_size:,}, {facts.weights.total / 1e9:,.1f} GB",
        ),
        ("", f"shapes: {facts.shapes.source}; size: {facts.weights.source}"),
        ("samples", f"{data.samples:,} of {mean:,.0f} tokens, {data.tokens / 1e6:,.1f} M tokens ({source})"),
    ]


def _disk_rows(facts: Forecast) -> Rows:
    config, data, target = facts.config, facts.data, facts.target
    sizes = {
        "bfloat16": disk.hidden_bytes(data, target, config, "bfloat16"),
        "float32": disk.hidden_bytes(data, target, config, "float32"),
        "fp8": disk.hidden_bytes(data, target, config, config.target.dtype, "fp8"),
    }
    hidden = disk.hidden_bytes(data, target, config, config.target.dtype, config.extract.store_dtype)
    one, held = disk.checkpoint_bytes(config, target, facts.training), disk.checkpoints_held(config, facts.steps)
    steps = {  # folder: bytes in all
        "prepared": disk.prepared_bytes(data, config),
        "hidden": hidden,
        "vocab": disk.vocab_bytes(config, target),
        "checkpoints": one * held,
    }
    left = sum(
        max(0, size - disk.written_bytes(config.folder(name))) for name, size in steps.items() if not facts.done(name)
    )
    place, fetched = disk.target_place(config, facts.weights)
    shown = ", ".join(f"{_gb(size)} in {name}" for name, size in sizes.items())
    rows = [
        ("target", f"{_gb(facts.weights.total)}, {_gb(fetched)} of it to be fetched   {place}"),
        ("prepared", f"{_gb(steps['prepared'])} at most"),
        ("hidden states", f"{shown}; this run: {facts.stored.name}"),
        ("checkpoints", f"{_gb(one * held)}: {held} of {_gb(one)}"),
    ]
    for found in disk.places([(config.runs_dir / config.name, left), (place, fetched)]):
        verdict = facts.verdict("disk", found.left, found.free)
        rows.append(("to be written", f"{_gb(found.left)}, {_gb(found.free)} free in {found.folder}: {verdict}"))
    return rows


def _hour_rows(facts: Forecast) -> Rows:
    return [("prepare", _prepare_hours(facts)), *_extract_hours(facts), *_train_hours(facts)]


def _extract_hours(facts: Forecast) -> Rows:
    section, tokens = facts.config.forecast, facts.data.tokens
    if facts.done("hidden"):
        return [("extract", "done")]
    ours = {"prefill_tokens_per_s", "prefill_untuned_tokens_per_s"} & section.model_fields_set
    if not ours and facts.target.model_type != PUBLISHED_RATES_OF:
        return [("extract", f"unknown: {tokens / 1e6:,.1f} M tokens to run; set forecast.prefill_tokens_per_s")]
    tuned, untuned = section.prefill_tokens_per_s, section.prefill_untuned_tokens_per_s
    rows = [
        ("extract", f"{_hours(tokens, tuned)} at {tuned:,.0f} tok/s, NCCL tuned; writes {_rate(facts, tuned)}"),
        ("", f"{_hours(tokens, untuned)} at {untuned:,.0f} tok/s, NCCL untuned"),
    ]
    if not ours:
        rows.append(
            ("", "published rates of Kimi-K2.5 on eight RTX PRO 6000; forecast.prefill_tokens_per_s sets yours")
        )
    reached = EXTRACT_REACHED[facts.config.extract.engine]
    rows.append(("", f"prefill alone; {reached} of it on one H200 (a Llama of 8 B)"))
    return rows


def _rate(facts: Forecast, tokens_per_s: float) -> str:
    """Bytes of states a second, which the disk must keep up with."""
    bytes_per_token = STATES_PER_TOKEN * facts.stored.row_bytes(facts.target.hidden_size)
    return f"{bytes_per_token * tokens_per_s / 1e6:,.0f} MB/s"


def _prepare_hours(facts: Forecast) -> str:
    section, data = facts.config.forecast, facts.data
    if facts.done("prepared"):
        return "done"
    if not facts.config.prepare.regenerate:
        return "minutes: nothing is regenerated"
    text = f"{data.answer_tokens / 1e6:,.1f} M tokens to generate"
    rate = section.generation_tokens_per_s
    if rate is None:
        return f"unknown: {text}; set forecast.generation_tokens_per_s"
    return f"{_hours(data.answer_tokens, rate)}: {text} at {rate:,.0f} tok/s"


def _train_hours(facts: Forecast) -> Rows:
    if facts.done("checkpoints"):
        return [("train", "done")]
    tokens, rate = facts.train_tokens * facts.config.train.epochs, facts.config.forecast.train_tokens_per_s
    text = f"{tokens / 1e6:,.1f} M tokens in {facts.steps:,} steps"
    if rate is None:
        text = f"unknown: {text}; set forecast.train_tokens_per_s"
    else:
        text = f"{_hours(tokens, rate)}: {text} at {rate:,.0f} tok/s"
    return [("train", text), *_all_reduce_rows(facts, rate)]


def _all_reduce_rows(facts: Forecast, tokens_per_s: float | None) -> Rows:
    """Part of what `train` shows as its rate, but not of one GPU's rate times their number."""
    train, bandwidth = facts.config.train, facts.config.forecast.all_reduce_gb_per_s
    if facts.processes == 1:
        return []
    memory = facts.training
    cost = all_reduce(memory.trainable, memory.output_rows, facts.processes, bandwidth)
    stepped = 0 if facts.sharded else memory.matrices
    stepped_s = broadcast_s(stepped, bandwidth)
    sent = f"{_gb(cost.gradient_bytes)} a step, {_gb(cost.link_bytes)} through each of {facts.processes} GPUs' links"
    in_all = _duration((cost.seconds + stepped_s) * facts.steps)
    whole = f"{in_all} in all; computing can hide {cost.hidden_s:.2f} s of a step's at most"
    if tokens_per_s is not None:
        step_s = train.rows_per_step * train.tokens_per_row / tokens_per_s
        each = -(-train.rows_per_step // facts.processes)
        share = (cost.seconds + stepped_s) / step_s
        whole = f"{100 * share:.0f} % of a step of {step_s:.2f} s (rows in each: {each}), {whole}"
    muon = [("", f"matrices, from the one that Muon stepped each in: {_gb(4 * stepped)} a step, {stepped_s:.2f} s")]
    return [
        ("", f"gradients: {sent}: {cost.seconds:.2f} s at {bandwidth:g} GB/s"),
        *(muon if stepped else []),
        ("", whole),
    ]


def _memory_heading(facts: Forecast) -> str:
    section = facts.config.forecast
    return f"memory of a GPU in GiB ({section.gpu_count} x {section.gpu_memory_gib:g})"


def _memory_rows(facts: Forecast) -> Rows:
    config, section = facts.config, facts.config.forecast
    gpus = config.target.tensor_parallel_size
    rows: Rows = []
    if gpus > section.gpu_count:
        verdict = facts.verdict("target.tensor_parallel_size", gpus, section.gpu_count)
        rows.append(
            ("target", f"target.tensor_parallel_size {gpus}, forecast.gpu_count {section.gpu_count}: {verdict}")
        )
    if config.prepare.regenerate:
        wanted = config.prepare.max_num_seqs
        memory = engine_memory(
            config,
            facts.target,
            facts.weights,
            batched_tokens=BATCHED_TOKENS,
            cache_tokens=config.target.max_length,
            captures=False,
        )
        at_once = max(0, memory.room_tokens // config.target.max_length)
        rows += _engine_rows(facts, "prepare", memory)
        rows.append(("", f"room for the keys and values of {at_once:,} full samples (prepare.max_num_seqs {wanted})"))
    memory = engine_memory(
        config,
        facts.target,
        facts.weights,
        batched_tokens=config.extract.max_batched_tokens,
        cache_tokens=bounds.cache_tokens(config),
        captures=True,
    )
    return [*rows, *_engine_rows(facts, "extract", memory), *_training_rows(facts)]


def _host_rows(facts: Forecast) -> Rows:
    """What engine `stream` holds of states (engine `speculators` holds one shard and some steps), and what training
    does: rows read ahead, in all its processes, and a checkpoint that is being written."""
    return [*_stream_rows(facts), *_training_host_rows(facts)]


def _training_host_rows(facts: Forecast) -> Rows:
    train, target, memory = facts.config.train, facts.target, facts.training
    row = pinned_row_bytes(train.tokens_per_row, AUX_LAYERS, target.hidden_size, facts.stored)
    ahead = train.prefetch_rows + min(train.prefetch_rows, VALIDATION_AHEAD)
    rows = facts.processes * max(1, ahead) * row
    saved = snapshot_bytes(memory.parameters, memory.moments, target.dtype)
    return [
        ("train", _gb(rows + saved)),
        ("", f"processes: {facts.processes}, rows ahead in each: {ahead} of {_gb(row)}; a checkpoint {_gb(saved)}"),
    ]


def _stream_rows(facts: Forecast) -> Rows:
    section, target = facts.config.extract, facts.target
    if section.engine != "stream":
        return []
    token_bytes = STATES_PER_TOKEN * target.hidden_size * target.dtype.itemsize
    ring, total = bounds.ring_bytes(section, token_bytes), bounds.host_bytes(section, token_bytes)
    shards = f"{bounds.shards_in_hand(section)} shards in hand {_gb(total - ring)}"
    return [
        ("extract", _gb(total)),
        ("", f"{shards} + {bounds.RING_STEPS} steps on their way {_gb(ring)}, pinned"),
    ]


def _engine_rows(facts: Forecast, step: str, memory: EngineMemory) -> Rows:
    verdict = facts.verdict(f"memory of {step}", memory.total, memory.limit)
    parts = {
        "weights": memory.weights,
        "keys and values": memory.cache,
        "activations": memory.activations,
        "captured states": memory.captured,
        "overhead": memory.overhead,
    }
    limit = f"gpu_memory_utilization {facts.config.target.gpu_memory_utilization:g}"
    return [
        (step, f"{_gib(memory.total)} of {_gib(memory.limit)} ({limit}): {verdict}"),
        ("", _parts(parts)),
    ]


def _training_rows(facts: Forecast) -> Rows:
    replica, section, train = facts.training, facts.config.forecast, facts.config.train
    overhead = section.gpu_overhead_gib * GIB
    have = section.gpu_memory_gib * GIB
    in_parts = sharded_memory(replica, facts.processes)
    memory, other, name = (in_parts, replica, "a replica") if facts.sharded else (replica, in_parts, "sharded")
    verdict = facts.verdict("memory of train", memory.total + overhead, have)
    parts = {
        "weights": memory.weights,
        "gradients": memory.gradients,
        "their exchange": memory.buckets,
        "optimiser": memory.optimizer,
        "target's words": memory.target,
        "activations": memory.activations,
        "overhead": overhead,
    }
    rows = -(-train.rows_per_step // facts.processes)
    text = f"{memory.parameters / 1e6:,.0f} M weights; processes: {facts.processes}, rows in each: {rows}, full, of "
    shown = [
        ("train", f"{_gib(memory.total + overhead)} of {_gib(have)}{', sharded' if facts.sharded else ''}: {verdict}"),
        ("", _parts(parts)),
        ("", f"{text}{train.tokens_per_row:,} tokens"),
    ]
    if facts.sharded or (facts.processes > 1 and not fits(replica, facts.config, have)):
        shown.append(("", f"train.sharding is {train.sharding}; {name} takes {_gib(other.total + overhead)}"))
    return shown


def _parts(parts: dict[str, float]) -> str:
    return " + ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size)


def _hours(tokens: int, rate: float) -> str:
    return _duration(tokens / rate)


def _duration(seconds: float) -> str:
    return clock(seconds) if seconds >= 3600 else f"{seconds / 60:,.0f} min"


def _gb(size_bytes: float) -> str:
    return f"{size_bytes / 1e9:,.1f} GB"


def _gib(size_bytes: float) -> str:
    return f"{size_bytes / GIB:,.1f}"
