"""What a folder holds, and with which settings it was made.

    plan.json      written first:  step, run key, inputs
    manifest.json  written last:   the same, a line per shard, totals

The run key is a hash of `inputs`, everything that changes the bytes, the predecessor's run key included.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.errors import InputError, MismatchError
from pipeline.store.atomic import file_sha256, write_json

FORMAT = 1


@dataclass(frozen=True)
class Shard:
    """One file of a folder. `tokens` counts all tokens in it, `sha256` its bytes."""

    file: str
    samples: int
    tokens: int
    size_bytes: int
    sha256: str

    @classmethod
    def describe(cls, path: Path, samples: int, tokens: int) -> "Shard":
        """Measure a finished file."""
        return cls(path.name, samples, tokens, path.stat().st_size, file_sha256(path))


@dataclass(frozen=True)
class Manifest:
    """A finished folder: `inputs` made it, `shards` are its files, `totals` what a user asks for."""

    step: str
    run_key: str
    inputs: dict[str, Any]
    shards: list[Shard]
    totals: dict[str, Any] = field(default_factory=dict)
    format: int = FORMAT


def run_key(inputs: dict[str, Any]) -> str:
    """Hash of all that changes the bytes: equal settings and data give equal keys, in any order of keys."""
    canonical = json.dumps(inputs, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return hashlib.sha256(canonical.encode()).hexdigest()[:32]


def claim(folder: Path, step: str, inputs: dict[str, Any], *, resumes: bool = True) -> Manifest | None:
    """Begin or go on with a folder. Returns its manifest when it is finished already, else None.

    A step that keeps nothing until it is finished (`resumes=False`) takes over an unfinished folder of other settings.

    Raises MismatchError, naming what differs and both keys, when the folder was begun with other inputs.
    """
    inputs = json.loads(json.dumps(inputs))  # tuples become lists, as they will be read back
    plan_file = folder / "plan.json"
    if (folder / "manifest.json").is_file():
        manifest = read_manifest(folder, step)
        _refuse_other_inputs(folder, step, manifest.inputs, inputs)
        return manifest
    if resumes and plan_file.is_file():
        _refuse_other_inputs(folder, step, _read_json(plan_file, step).get("inputs", {}), inputs)
        return None
    folder.mkdir(parents=True, exist_ok=True)
    write_json(plan_file, {"step": step, "run_key": run_key(inputs), "inputs": inputs})
    return None


def release(folder: Path) -> None:
    """Give up a folder that `claim` began and in which nothing is worth keeping: other inputs may then claim it."""
    (folder / "plan.json").unlink(missing_ok=True)


def finish(folder: Path, step: str, inputs: dict[str, Any], shards: list[Shard], totals: dict[str, Any]) -> Manifest:
    """Declare a folder complete: write its manifest, last and atomically."""
    inputs = json.loads(json.dumps(inputs))
    manifest = Manifest(step, run_key(inputs), inputs, shards, totals)
    write_json(folder / "manifest.json", asdict(manifest))
    return manifest


def read_manifest(folder: Path, step: str) -> Manifest:
    """The manifest of a finished folder. Raises InputError when there is none or it cannot be trusted."""
    path = folder / "manifest.json"
    if not path.is_file():
        raise InputError(f"{step}: {folder} is not finished (no manifest.json). Run the {step} step first")
    value = _read_json(path, step)
    try:
        manifest = Manifest(**{**value, "shards": [Shard(**shard) for shard in value["shards"]]})
    except (KeyError, TypeError) as error:
        raise InputError(f"{step}: {path} is not a manifest ({error}). Remove the folder, run {step} again") from None
    if manifest.format != FORMAT or manifest.step != step or manifest.run_key != run_key(manifest.inputs):
        raise InputError(f"{step}: {path} is not a valid manifest of this step. Remove the folder, run {step} again")
    return manifest


def verify(folder: Path, manifest: Manifest) -> None:
    """Compare every file's size and checksum with its line. Raises InputError for the first that differs."""
    for shard in manifest.shards:
        path = folder / shard.file
        if not path.is_file():
            raise InputError(
                f"{manifest.step}: {path} is missing. Remove {folder / 'manifest.json'}, run the step again"
            )
        if path.stat().st_size != shard.size_bytes or file_sha256(path) != shard.sha256:
            raise InputError(
                f"{manifest.step}: {path} is not the file that was written (checksum). "
                f"Remove {folder / 'manifest.json'}, run the step again"
            )


def _read_json(path: Path, step: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise InputError(f"{step}: {path} is not JSON ({error}). Remove it, run {step} again") from None
    if not isinstance(value, dict):
        raise InputError(f"{step}: {path} is not a JSON object. Remove it, run {step} again")
    return value


def _refuse_other_inputs(folder: Path, step: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    if old == new:
        return
    # a setting that both have says more than one that came or went with it
    names = sorted({*old, *new}, key=lambda key: (key not in old or key not in new, key))
    name = next(key for key in names if old.get(key) != new.get(key))
    raise MismatchError(
        f"{step}: {folder} was made with {name} {old.get(name)}, this run has {new.get(name)} "
        f"(run keys {run_key(old)[:12]} and {run_key(new)[:12]}).\n"
        f"{' ' * len(step)}  Use the old settings, another run name, or remove the folder; nothing was changed"
    )
