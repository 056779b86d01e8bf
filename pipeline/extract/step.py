"""The step `extract`: plan, resume, capture, check, write, in this order."""

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from itertools import tee
from pathlib import Path
from typing import Any

import torch

from pipeline.config import Run
from pipeline.errors import Stopped, UserError
from pipeline.extract import engines
from pipeline.extract.check import Expected, check_captured
from pipeline.extract.engines import Captured
from pipeline.extract.parts import Part, claiming, held
from pipeline.extract.plan import (
    Found,
    Limits,
    Planned,
    plan,
    record,
    remaining,
    remove_leftovers,
    reopen,
    verified,
)
from pipeline.extract.progress import Counts, Progress
from pipeline.extract.space import require_memory, require_room
from pipeline.extract.stop import ShardSignals
from pipeline.extract.versions import engine_versions
from pipeline.progress import clock, scaled
from pipeline.store import Manifest, Shard, claim, finish, read_manifest, release, run_key, writing
from pipeline.store.dtypes import is_encoded
from pipeline.store.json_lines import JsonLines
from pipeline.store.records import remove_records
from pipeline.store.samples import Sample
from pipeline.store.states import write_states
from pipeline.target import Target


@dataclass(frozen=True)
class Job:
    """One extraction: where from, where to, and what is expected of the states."""

    config: Run
    target: Target
    inputs: dict[str, Any]
    expected: Expected

    @property
    def prepared(self) -> Path:
        return self.config.folder("prepared")

    @property
    def folder(self) -> Path:
        return self.config.folder("hidden")

    @property
    def aux_layers(self) -> list[int]:
        return self.expected.layer_ids[:-1]

    @property
    def last_layer(self) -> int:
        return self.expected.layer_ids[-1]

    @property
    def part(self) -> Part:
        return Part.of(self.config.extract.shard)


def extract(config: Run) -> None:
    """Make hidden/ of this run, or a part of it, or what is left of that."""
    job = job_of(config)
    with ShardSignals() as stop, writing(job.folder, "extract"), held(job.folder, job.part):
        with claiming(job.folder, job.part):
            manifest = claim(job.folder, "extract", job.inputs)
            if manifest and _is_whole(job.folder, manifest):
                print(f"extract  already done: {manifest.totals['samples']:,} samples  {job.folder}")
                return
        try:
            _extract(job, stop)
        except (UserError, Stopped):
            if job.part.is_whole and not any(job.folder.glob("shard-*.safetensors*")):
                release(job.folder)  # nothing to keep: another attempt may have other settings
            raise


def _extract(job: Job, stop: ShardSignals) -> None:
    planned = plan_of(job)
    mine = job.part.take(planned)
    done = resume(job, mine, alone=job.part.is_whole).done
    todo = [shard for shard in mine if shard.file not in done]
    _require_room(job, planned, mine, done)
    if todo:
        form = job.expected
        token_bytes = len(form.layer_ids) * form.hidden_size * form.dtype.itemsize
        require_memory(job.config.extract, todo, token_bytes)
    progress = _progress(job, mine, done)
    if todo:
        with _shown(progress), closing(engines.start(job.config, job.target, job.expected.layer_ids)) as engine:
            files = {shard.file for shard in todo}
            if isinstance(engine, engines.WritingEngine):
                done |= _follow(job, engine, planned, files, progress, stop)
            else:
                done |= _capture(job, engine, planned, files, progress, stop)
            progress.end()
    if job.part.is_whole:
        complete(job, planned, done)
    _print_closing_line(job, progress, mine)


def plan_of(job: Job) -> list[Planned]:
    """All shards of the run, whoever makes them."""
    limits = Limits(job.target.vocab_size, job.config.target.max_length)
    return plan(job.prepared, job.config.extract.shard_tokens, limits)


def complete(job: Job, planned: list[Planned], done: dict[str, Shard]) -> None:
    """Write the manifest of a folder in which every planned shard is done."""
    shards = [done[shard.file] for shard in planned]
    finish(job.folder, "extract", job.inputs, shards, _totals(job, planned, shards))
    remove_records(job.folder, shards)


def _print_closing_line(job: Job, progress: Progress, mine: list[Planned]) -> None:
    counts, first_s = progress.counts, progress.first_token_s
    first = f", first states after {first_s:.1f} s" if first_s is not None else ""
    of = "" if job.part.is_whole else f"part {job.part}: "
    speed = f"{progress.tokens_per_s:,.0f} tok/s{first}"
    print(
        f"extract  {of}{counts.samples:,} samples, {scaled(counts.tokens)}tok in {clock(progress.elapsed_s)} ({speed})"
        f", {scaled(counts.written_bytes)}B in {len(mine)} shards: {job.folder}"
    )
    if not job.part.is_whole:
        print("extract  when all parts are done: python -m pipeline merge, with the same --config")


def job_of(config: Run) -> Job:
    """Everything that can be known to be wrong before a file is touched or the engine is started."""
    prepared = read_manifest(config.folder("prepared"), "prepare")
    target = Target(config.target)
    aux_layers = target.aux_layers(config.extract.aux_layers)
    inputs = {
        "prepared": prepared.run_key,
        "target": target.fingerprint,
        "aux_layers": aux_layers,
        "last_layer": target.num_layers,
        "dtype": config.target.dtype,
        "max_length": config.target.max_length,
        "shard_tokens": config.extract.shard_tokens,
        "engine": config.extract.engine,
        **_storing(config),
        **engine_versions(),
    }
    expected = Expected([*aux_layers, target.num_layers], target.hidden_size, target.dtype)
    return Job(config, target, inputs, expected)


def _is_whole(folder: Path, manifest: Manifest) -> bool:
    """Whether a finished folder still holds its files; if not, those that are left are made ready for a resume."""
    errors = reopen(folder, manifest)
    for error in errors:
        print(error)
    if not errors:
        remove_records(folder, manifest.shards)
    return not errors


def resume(job: Job, mine: list[Planned], *, alone: bool, step: str = "extract") -> Found:
    """What is done of `mine` already; says so. What is half-written is removed, what is damaged moved aside."""
    remove_leftovers(job.folder, mine, alone=alone)
    found = verified(job.folder, mine, run_key(job.inputs))
    if found.done or found.again:
        print(
            f"{step}  goes on: {len(found.done)} of {len(mine)} shards are finished and verified, "
            f"{len(found.again)} unfinished or altered to be made again{_named(found.again)}"
        )
    if found.aside:
        print(f"{step}  {len(found.aside)} damaged, kept until you remove them{_named(found.aside)}")
    return found


def _named(files: list[str]) -> str:
    return f" ({', '.join(files[:3])}{', …' if len(files) > 3 else ''})" if files else ""


def _require_room(job: Job, planned: list[Planned], mine: list[Planned], done: dict[str, Shard]) -> None:
    """Room for all that is left, that of other parts included: they write to the same disk."""
    if len(done) == len(mine):
        return
    own = {shard.file for shard in mine}
    others = {shard.file for shard in planned if shard.file not in own and (job.folder / shard.file).is_file()}
    require_room(
        job.folder,
        planned,
        others | set(done),
        aux_layers=job.aux_layers,
        last_layer=job.last_layer,
        hidden_size=job.expected.hidden_size,
        dtype=job.config.target.dtype,
        store_dtype=job.config.extract.store_dtype,
    )


def _progress(job: Job, planned: list[Planned], done: dict[str, Shard]) -> Progress:
    target = job.config.extract.progress_json
    counts = Counts(
        samples=sum(shard.samples for shard in planned),
        tokens=sum(shard.tokens for shard in planned),
        shards=len(planned),
        done_samples=sum(shard.samples for shard in done.values()),
        done_tokens=sum(shard.tokens for shard in done.values()),
        done_shards=len(done),
        written_bytes=sum(shard.size_bytes for shard in done.values()),
    )
    return Progress(
        job.folder, counts, str(job.part), JsonLines(target) if target else None, json_on_stderr=target == "-"
    )


@contextmanager
def _shown(progress: Progress) -> Iterator[None]:
    """Show progress; tell other programs how it ended."""
    progress.open()
    try:
        yield
    except BaseException as error:
        progress.close("stopped" if isinstance(error, KeyboardInterrupt) else "failed")
        raise
    progress.close()


def _capture(
    job: Job, engine: engines.Engine, planned: list[Planned], files: set[str], progress: Progress, stop: ShardSignals
) -> dict[str, Shard]:
    """Run the samples of `files` through the engine, shard by shard. Returns the new shards by file name.

    Raises Stopped after the shard in hand when there was a signal.
    """
    new: dict[str, Shard] = {}
    todo, for_engine = tee(remaining(job.prepared, planned, files))
    captured = engine.capture(samples for _, samples in for_engine)
    progress.begin()
    for shard, samples in todo:
        with stop.shard_in_hand():
            aux_TLH, last_TH = _gather(job, shard, samples, captured, progress)
            written = write_states(
                job.folder / shard.file,
                samples,
                aux_TLH,
                last_TH,
                aux_layers=job.aux_layers,
                last_layer=job.last_layer,
                run_key=run_key(job.inputs),
                store_dtype=job.config.extract.store_dtype,
            )
            record(job.folder, shard, written, run_key(job.inputs))
            progress.shard_done(written.size_bytes)
            new[shard.file] = written
    return new


def _follow(
    job: Job,
    engine: engines.WritingEngine,
    planned: list[Planned],
    files: set[str],
    progress: Progress,
    stop: ShardSignals,
) -> dict[str, Shard]:
    """Have an engine that writes by itself make `files`. Returns the new shards by file name.

    Raises Stopped after the shards in hand when there was a signal.
    """
    new: dict[str, Shard] = {}
    in_order = [shard.file for shard in planned if shard.file in files]
    order = engines.Order(job.prepared, job.folder, planned, in_order, run_key(job.inputs))
    progress.begin()
    with stop.shard_in_hand(), closing(engine.write(order, lambda: bool(stop.received))) as stream:
        for went in stream:
            for tokens in went.tokens:
                progress.advance(tokens)
            for written in went.written:
                progress.shard_done(written.size_bytes)
                new[written.file] = written
    return new


def _gather(
    job: Job, shard: Planned, samples: list[Sample], captured: Iterator[Captured], progress: Progress
) -> tuple[torch.Tensor, torch.Tensor]:
    """The checked states of one shard's samples, in rows: aux [T, L, H] and last [T, H]."""
    form = job.expected
    aux_TLH = torch.empty(shard.tokens, len(job.aux_layers), form.hidden_size, dtype=form.dtype)
    last_TH = torch.empty(shard.tokens, form.hidden_size, dtype=form.dtype)
    row = 0
    for sample in samples:
        result = next(captured)
        check_captured(sample, result, form)
        rows = slice(row, row := row + len(sample.input_ids_S))
        *aux_LSH, last_SH = result.states_LSH
        torch.stack(aux_LSH, dim=1, out=aux_TLH[rows])
        last_TH[rows] = last_SH
        progress.advance(len(sample.input_ids_S))
    return aux_TLH, last_TH


def _totals(job: Job, planned: list[Planned], shards: list[Shard]) -> dict[str, Any]:
    return {
        "samples": sum(shard.samples for shard in shards),
        "tokens": sum(shard.tokens for shard in shards),
        "supervised_tokens": sum(shard.supervised for shard in planned),
        "size_bytes": sum(shard.size_bytes for shard in shards),
        "aux_layers": job.aux_layers,
        "last_layer": job.last_layer,
        "hidden_size": job.expected.hidden_size,
        "dtype": job.config.target.dtype,
        **_storing(job.config),
    }


def _storing(config: Run) -> dict[str, str]:
    """How states are stored, where that is not how they were computed: it changes the bytes. Empty where it is, so that
    folders keep their run key from before there was a choice."""
    if not is_encoded(config.target.dtype, config.extract.store_dtype):
        return {}
    return {"store_dtype": str(config.extract.store_dtype)}
