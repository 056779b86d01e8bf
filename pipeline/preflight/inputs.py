"""Checks of what a run reads and of where it writes: the target model's files, the disk. Nothing is downloaded."""

import json
import shutil
import struct
import tempfile
from importlib.util import find_spec
from pathlib import Path

from pipeline.config import Run, TargetSection
from pipeline.errors import ConfigError, InputError
from pipeline.extract.stream import bounds
from pipeline.preflight.finding import Facts, Finding, State
from pipeline.store import read_manifest
from pipeline.store.dtypes import stored_dtype
from pipeline.target import Target, is_hub_name

STATES_PER_TOKEN = 4
"""Three aux layers and the last one."""
MAX_HEADER_BYTES = 100_000_000
"""safetensors' own limit; a file that names more is none."""
KIMI_HIDDEN_SIZE = 7168
"""For an order of magnitude where the target cannot be read yet."""


# ---- The target model


def target_model(facts: Facts) -> Finding:
    """The target's folder has its configuration and every file of weights, whole; or says that prepare fetches it."""
    section = facts.config.target
    try:
        Target(section).require_pin()
    except ConfigError as error:
        return Finding(State.FAIL, str(error).removeprefix("target: "))
    if section.load_format == "fastsafetensors" and find_spec("fastsafetensors") is None:
        advice = "Install it, or leave target.load_format at auto"
        return Finding(State.FAIL, f"target.load_format fastsafetensors: the package is not installed. {advice}")
    path, folder = section.path, local_folder(section)
    if folder is None:
        if section.gguf and not Path(path).exists():
            return Finding(State.OK, f"{path}: not there yet, unpacked from {section.gguf} by prepare")
        if is_hub_name(path):
            return Finding(State.OK, f"{path}: no folder here, taken for a Hugging Face name: fetched by prepare")
        advice = "Set target.path to the model's folder or Hugging Face name"
        return Finding(State.FAIL, f"{path}: no such folder. {advice}")
    target = Target.at(section, folder)
    shape = f"{target.num_layers} layers, hidden size {target.hidden_size:,}"
    names = weight_files(folder)
    missing = [name for name in names if not (folder / name).is_file()]
    torn = [name for name in names if name not in missing and not is_whole(folder / name)]
    wrong = [f"{name} is missing" for name in missing] + [f"{name} is cut short" for name in torn]
    if wrong and not Path(path).is_dir():
        return Finding(State.OK, f"{path}: {len(wrong)} of {len(names)} weight files left to be fetched by prepare")
    if wrong:
        text = f"{folder}: {len(wrong)} of {len(names)} weight files cannot be used. Copy or fetch them again"
        return Finding(State.FAIL, text, tuple(wrong))
    size = f"{len(names)} weight files, {weight_bytes(folder) / 1e9:,.1f} GB"
    return Finding(State.OK, f"{folder}: {shape}, {size}")


def local_folder(section: TargetSection) -> Path | None:
    """Where the target lies on this machine, the hub's cache included; None if it does not."""
    if Path(section.path).is_dir():
        return Path(section.path)
    if section.gguf or not is_hub_name(section.path):
        return None
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(snapshot_download(section.path, revision=section.revision, local_files_only=True))
    except (LocalEntryNotFoundError, ValueError):  # ValueError: no name that the hub would take; prepare says so
        return None


def readable_target(config: Run) -> Target | None:
    """The target, when its configuration is here and good."""
    folder = local_folder(config.target)
    if folder is None:
        return None
    target = Target.at(config.target, folder)
    try:
        return target if target.hidden_size and target.vocab_size else None
    except InputError:
        return None


def weight_files(folder: Path) -> list[str]:
    """Names of the safetensors files that the model consists of. Raises InputError where that is not known."""
    index = folder / "model.safetensors.index.json"
    if not index.is_file():
        return ["model.safetensors"]
    try:
        return sorted(set(json.loads(index.read_bytes())["weight_map"].values()))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{index} is not an index of weights ({error!r}). Copy or fetch it again") from None


def weight_bytes(folder: Path) -> int:
    """Size of those weight files that are there; 0 where the index is bad, which `target_model` tells."""
    try:
        paths = [folder / name for name in weight_files(folder)]
    except InputError:
        return 0
    return sum(path.stat().st_size for path in paths if path.is_file())


def is_whole(path: Path) -> bool:
    """Whether a safetensors file is as long as its header says; reads the header only.

    The form is 8 bytes with the header's length, the header (JSON), the tensors (huggingface.co/docs/safetensors).
    """
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else MAX_HEADER_BYTES + 1
        if length > MAX_HEADER_BYTES:
            return False
        try:
            header = json.loads(file.read(length))
            ends = [entry["data_offsets"][1] for name, entry in header.items() if name != "__metadata__"]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            return False
    return path.stat().st_size == 8 + length + max(ends, default=0)


def states_in_memory(config: Run, target: Target) -> int:
    """Bytes of states that extract holds in host memory: the shards in hand of engine `stream`. The other one holds
    little."""
    if config.extract.engine != "stream":
        return 0
    row_bytes = stored_dtype(config.target.dtype, None).row_bytes(target.hidden_size)  # encoded when they are written
    return bounds.host_bytes(config.extract, STATES_PER_TOKEN * row_bytes)


# ---- The disk


def disk(facts: Facts) -> Finding:
    """The run's folder can be written to, and has room for the states that extract will still write."""
    run = facts.config.runs_dir / facts.config.name
    place = next(folder for folder in [run, *run.absolute().parents] if folder.exists())
    try:
        with tempfile.TemporaryFile(dir=place):
            pass
    except OSError as error:
        advice = "Let this user write there, or set runs_dir"
        return Finding(State.FAIL, f"{place} cannot be written to ({error.strerror}). {advice}")
    free = shutil.disk_usage(place).free
    have = f"{free / 1e9:,.1f} GB free in {place}"
    hidden, prepared = facts.config.folder("hidden"), facts.config.folder("prepared")
    if (hidden / "manifest.json").is_file():
        size = read_manifest(hidden, "extract").totals.get("size_bytes", 0)
        return Finding(State.OK, f"{have}; extract is finished ({size / 1e9:,.1f} GB)")
    stored = stored_dtype(facts.config.target.dtype, facts.config.extract.store_dtype)
    item, target = stored.item_bytes, readable_target(facts.config)
    if target is None:
        example = STATES_PER_TOKEN * KIMI_HIDDEN_SIZE * item / 1e3
        return Finding(
            State.OK,
            f"{have}; the target cannot be read yet: a million tokens take {STATES_PER_TOKEN} x hidden_size x {item} "
            f"MB, {example:,.1f} GB at Kimi's {KIMI_HIDDEN_SIZE:,}",
        )
    token_bytes = STATES_PER_TOKEN * stored.row_bytes(target.hidden_size)
    if not (prepared / "manifest.json").is_file():
        return Finding(
            State.OK,
            f"{have}; prepare is not finished: a million tokens take {token_bytes / 1e3:,.1f} GB, "
            f"so there is room for {free / token_bytes / 1e6:,.1f} million",
        )
    tokens = sum(shard.tokens for shard in read_manifest(prepared, "prepare").shards)
    written = sum(path.stat().st_size for path in hidden.glob("shard-*.safetensors"))
    left = max(0, tokens * token_bytes - written)
    plan = f"extract will write {left / 1e9:,.1f} GB ({tokens:,} tokens x {token_bytes:,} B"
    plan += f", {written / 1e9:,.1f} GB written before)" if written else ")"
    if left > free:
        return Finding(State.FAIL, f"{have}; {plan}. Make room, or set runs_dir to another disk")
    return Finding(State.OK, f"{have}; {plan}")
