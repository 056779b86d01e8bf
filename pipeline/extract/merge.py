"""Finish hidden/ after jobs have extracted all its parts.

    python -m pipeline merge --config configs/kimi-k2.5.toml

Each job has run `extract` with `--extract.shard i/n`, with this configuration otherwise. Every planned shard is read
once and compared with its checksum; then the manifest is written, and the folder is byte-identical to that of one job.
Exit codes: 4 and the names where shards are missing, damaged or of other settings; 6 while a job is at work.
"""

from pipeline.config import Run
from pipeline.errors import InputError
from pipeline.extract.parts import Part, held
from pipeline.extract.plan import Planned
from pipeline.progress import scaled
from pipeline.store import claim, read_manifest


def run(config: Run) -> None:
    """Write the manifest of a complete hidden/. Raises InputError, naming what is missing; see pipeline.errors."""
    from pipeline.extract.step import complete, job_of, plan_of, resume  # torch: not for --help

    job = job_of(config)
    if not (job.folder / "plan.json").is_file():
        raise InputError(f"merge: {job.folder} was not begun. Run extract with --extract.shard first")
    with held(job.folder, Part(), "merge"):
        if claim(job.folder, "extract", job.inputs) is None:
            planned = plan_of(job)
            found = resume(job, planned, alone=True, step="merge")
            if missing := [shard for shard in planned if shard.file not in found.done]:
                raise InputError(_told(planned, missing))
            complete(job, planned, found.done)
        manifest = read_manifest(job.folder, "extract")
    print(
        f"merge  {manifest.totals['samples']:,} samples, {scaled(manifest.totals['tokens'])}tok, "
        f"{scaled(manifest.totals['size_bytes'])}B in {len(manifest.shards)} shards: {job.folder}"
    )


def _told(planned: list[Planned], missing: list[Planned]) -> str:
    names = ", ".join(shard.file for shard in missing[:5]) + (", …" if len(missing) > 5 else "")
    return (
        f"merge: {len(missing)} of {len(planned)} shards are not done ({names}). Run extract again: without "
        "--extract.shard it makes what is missing and finishes the folder; nothing was lost"
    )
