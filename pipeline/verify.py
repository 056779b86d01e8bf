"""Whether the files of a run are what was written: their sizes and checksums, read as fast as the disk gives them.

    python -m pipeline verify runs/NAME [--threads N]
    python -m pipeline verify runs/NAME/hidden

Needs no configuration. DIR is a run's folder or one of its steps'. A finished folder is compared with its manifest, an
unfinished hidden/ with the records of its finished shards. A damaged shard of hidden/ is moved aside, never deleted
(`shard-00000.safetensors.damaged-1`), and made again by the next `extract`; of other folders it is only named.
Exit codes: 0 all as written, 4 something is not, or there is nothing to verify.
"""

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import InputError, UserError
from pipeline.progress import Meter
from pipeline.store import Manifest, Shard, exclusive, read_manifest
from pipeline.store.checksums import default_threads
from pipeline.store.records import altered, move_aside, read_record


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own flags."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="a run's folder, or one of its steps'")
    parser.add_argument("--threads", type=int, default=default_threads(), metavar="N",
                        help="files read at once (default: a core each, %(default)s)")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Verify and print a line a folder, then what is wrong on stderr. Returns the exit code."""
    folders = step_folders(options.folder)
    if not folders:
        raise InputError(f"verify: {options.folder} is no folder of a run: no manifest.json, no plan.json")
    worst = 0
    for folder in folders:
        try:
            worst |= _verify(folder, max(1, options.threads))
        except UserError as error:
            print(error, file=sys.stderr)
            worst = InputError.exit_code
    return InputError.exit_code if worst else 0


def step_folders(folder: Path) -> list[Path]:
    """`folder` itself where a step has written it, else those in it that one has."""
    return [path for path in [folder, *sorted(folder.glob("*/"))] if _begun(path)]


def _begun(folder: Path) -> bool:
    return (folder / "manifest.json").is_file() or (folder / "plan.json").is_file()


@dataclass(frozen=True)
class Contents:
    """What a folder should hold, as far as anyone has said so."""

    step: str
    shards: list[Shard]
    finished: bool


def contents(folder: Path) -> Contents:
    """Read the manifest, or the records of an unfinished hidden/. Raises InputError when it is not to be trusted."""
    finished = (folder / "manifest.json").is_file()
    path = folder / ("manifest.json" if finished else "plan.json")
    try:
        plan = json.loads(path.read_bytes())
        step, key = str(plan["step"]), str(plan["run_key"])
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"verify: {path} is not what a step writes ({error!r})") from None
    if finished:
        manifest: Manifest = read_manifest(folder, step)
        return Contents(step, manifest.shards, True)
    files = [path.with_suffix(".safetensors").name for path in sorted(folder.glob("shard-*.json"))]
    records = [read_record(folder, file, key) for file in files]
    return Contents(step, [shard for shard in records if shard], False)


def _verify(folder: Path, threads: int) -> int:
    held = contents(folder)
    with Meter(f"verify  {folder}", sum(shard.size_bytes for shard in held.shards)) as meter:
        wrong = altered(folder, held.shards, threads, meter.add)
    state = "" if held.finished else ", unfinished"
    whole = f"{len(held.shards) - len(wrong)} of {len(held.shards)} files as written{state}"
    print(f"verify  {folder}: {whole}  {meter.line()}")
    if not held.shards:
        print(f"verify: {folder} has no finished file yet", file=sys.stderr)
    for file, what in wrong.items():
        print(f"verify: {folder / file} {what}", file=sys.stderr)
    if wrong:
        print(f"verify: {_remedy(folder, held, wrong)}", file=sys.stderr)
    return len(wrong) or not held.shards


def _remedy(folder: Path, held: Contents, wrong: dict[str, str]) -> str:
    if held.step != "extract":
        return f"{folder} is not to be used. Remove {folder / 'manifest.json'} and run {held.step} again"
    with exclusive(folder, "verify"):  # an extraction at work would have made them again meanwhile: look once more
        now = contents(folder)
        still = altered(folder, [shard for shard in now.shards if shard.file in wrong])
        moved = move_aside(folder, still)
    aside = f"moved aside as {', '.join(moved)}; " if moved else ""
    return f"{aside}run extract again: it makes {'it' if len(wrong) == 1 else 'them'} again"
