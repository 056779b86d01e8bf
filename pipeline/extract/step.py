"""The step `extract`: plan, resume, capture, check, write, in this order."""

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import tee
from pathlib import Path
from typing import Any

import torch

from pipeline.config import Run
from pipeline.errors import UserError
from pipeline.extract import engines
from pipeline.extract.check import Expected, check_captured
from pipeline.extract.engines import Captured
from pipeline.extract.plan import (
    Limits,
    Planned,
    plan,
    record,
    remaining,
    remove_leftovers,
    remove_records,
    reopen,
    verified,
)
from pipeline.extract.progress import Progress
from pipeline.extract.versions import engine_versions
from pipeline.progress import clock, scaled
from pipeline.store import Manifest, Shard, claim, exclusive, finish, read_manifest, release, require_space, run_key
from pipeline.store.samples import Sample
from pipeline.store.states import write_states
from pipeline.target import Target

TOKEN_BYTES = 5
"""Of a token's id and mask. Sample ids, offsets and headers are below 0.1 % of any real shard."""


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
    def bytes_per_token(self) -> int:
        states = len(self.expected.layer_ids) * self.expected.hidden_size * self.expected.dtype.itemsize
        return states + TOKEN_BYTES


def extract(config: Run) -> None:
    """Make hidden/ of this run, or what is left of it."""
    job = _job(config)
    with exclusive(job.folder, "extract"):
        manifest = claim(job.folder, "extract", job.inputs)
        if manifest and _is_whole(job.folder, manifest):
            print(f"extract  already done: {manifest.totals['samples']:,} samples  {job.folder}")
            return
        try:
            _extract(job)
        except UserError:
            if not any(job.folder.glob("shard-*.safetensors")):
                release(job.folder)  # nothing to keep: another attempt may have other settings
            raise


def _extract(job: Job) -> None:
    limits = Limits(job.target.vocab_size, job.config.target.max_length)
    planned = plan(job.prepared, job.config.extract.shard_tokens, limits)
    done = _resume(job, planned)
    todo_tokens = sum(shard.tokens for shard in planned if shard.file not in done)
    require_space(job.folder, todo_tokens * job.bytes_per_token, "extract")
    progress = _progress(job, planned, done)
    if todo_tokens:
        with closing(engines.start(job.config, job.target, job.expected.layer_ids)) as engine, closing(progress):
            if isinstance(engine, engines.WritingEngine):
                done |= _follow(job, engine, planned, done, progress)
            else:
                done |= _capture(job, engine, planned, done, progress)
    shards = [done[shard.file] for shard in planned]
    finish(job.folder, "extract", job.inputs, shards, _totals(job, planned, shards))
    remove_records(job.folder, shards)
    print(
        f"extract  {progress.samples:,} samples, {scaled(progress.tokens)}tok in {clock(progress.elapsed_s)} "
        f"({progress.tokens_per_s:,.0f} tok/s), {scaled(progress.written_bytes)}B in {len(shards)} shards: {job.folder}"
    )


def _job(config: Run) -> Job:
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


def _resume(job: Job, planned: list[Planned]) -> dict[str, Shard]:
    remove_leftovers(job.folder)
    done, again = verified(job.folder, planned, run_key(job.inputs))
    if done or again:
        names = f" ({', '.join(again[:3])}{', …' if len(again) > 3 else ''})" if again else ""
        print(
            f"extract  goes on: {len(done)} of {len(planned)} shards are finished and verified, "
            f"{len(again)} unfinished or altered to be made again{names}"
        )
    return done


def _progress(job: Job, planned: list[Planned], done: dict[str, Shard]) -> Progress:
    return Progress(
        job.folder,
        samples=sum(shard.samples for shard in planned),
        tokens=sum(shard.tokens for shard in planned),
        done_samples=sum(shard.samples for shard in done.values()),
        done_tokens=sum(shard.tokens for shard in done.values()),
        written_bytes=sum(shard.size_bytes for shard in done.values()),
    )


def _capture(
    job: Job, engine: engines.Engine, planned: list[Planned], done: dict[str, Shard], progress: Progress
) -> dict[str, Shard]:
    """Run what is not done through the engine, shard by shard. Returns the new shards by file name."""
    new: dict[str, Shard] = {}
    todo, for_engine = tee(remaining(job.prepared, planned, done))
    captured = engine.capture(samples for _, samples in for_engine)
    progress.begin()
    for shard, samples in todo:
        aux_TLH, last_TH = _gather(job, shard, samples, captured, progress)
        written = write_states(
            job.folder / shard.file,
            samples,
            aux_TLH,
            last_TH,
            aux_layers=job.aux_layers,
            last_layer=job.last_layer,
            run_key=run_key(job.inputs),
        )
        record(job.folder, shard, written, run_key(job.inputs))
        progress.written_bytes += written.size_bytes
        new[shard.file] = written
    return new


def _follow(
    job: Job, engine: engines.WritingEngine, planned: list[Planned], done: dict[str, Shard], progress: Progress
) -> dict[str, Shard]:
    """Have what is not done made by an engine that writes by itself. Returns the new shards by file name."""
    new: dict[str, Shard] = {}
    order = engines.Order(job.prepared, job.folder, planned, list(done), run_key(job.inputs))
    progress.begin()
    with closing(engine.write(order)) as stream:
        for went in stream:
            for tokens in went.tokens:
                progress.advance(tokens)
            for written in went.written:
                progress.written_bytes += written.size_bytes
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
    }
