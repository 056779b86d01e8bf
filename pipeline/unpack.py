"""A target model out of an installed Python package: a small real model where no model hub can be reached.

`target.gguf` names the package and its GGUF file. `prepare` makes the folder `target.path` of it, once: weights in
float32 (vLLM and transformers load those; a GGUF file itself only the one or the other), tokenizer, chat template.
"""

from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from pipeline.config import TargetSection
from pipeline.errors import NO_ROOM, InputError
from pipeline.store import atomic_folder, require_space, waiting

ROOM_BYTES = 64 << 20
"""Asked for beside the weights: tokenizer and configuration are a few megabytes."""


def unpack(target: TargetSection, step: str) -> None:
    """Make the folder `target.path` from `target.gguf` where there is none. Whole or not at all, also for two at once.

    Raises InputError for a package that is not installed, a file that it does not carry or that is no model, and a
    place that cannot be written to; SpaceError without room for it.
    """
    folder = Path(target.path)
    if target.gguf is None or folder.exists():
        return
    file = _packaged(target.gguf, step)

    def say_that_it_waits() -> None:
        print(f"{step}  waiting for another process that unpacks {folder}", flush=True)

    try:
        with waiting(folder, say_that_it_waits):
            if not folder.exists():  # the other process may have made it
                _make(folder, file, step)
    except OSError as error:
        if error.errno in NO_ROOM:
            raise
        raise InputError(
            f"{step}: {folder} cannot be made ({error.strerror or error}). "
            "Make its place writable, or set target.path to a folder that is there or can be made"
        ) from error


def _make(folder: Path, file: Path, step: str) -> None:
    require_space(folder.parent, 4 * _num_weights(file, step) + ROOM_BYTES, step, key="target.path")
    print(f"{step}  unpacking {file.name} to {folder}", flush=True)
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name)
        tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    except (OSError, ValueError, KeyError, NotImplementedError) as error:
        raise InputError(f"{step}: transformers cannot load {file}: {_first_line(error)}") from error
    with atomic_folder(folder) as temporary:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        (temporary / "tokenizer.model").unlink(missing_ok=True)  # a copy of the whole GGUF file that nothing reads


def _packaged(gguf: str, step: str) -> Path:
    """Where the file lies. By the package's list of files, because not every such package can be imported."""
    package, name = gguf.split(":", 1)
    try:
        files = distribution(package).files or []
    except PackageNotFoundError:
        raise InputError(
            f"{step}: the package {package} (target.gguf) is not installed, and the model is not there yet. "
            "Install it, or set target.path to a model's folder"
        ) from None
    for entry in files:
        path = Path(str(entry.locate()))
        if f"/{entry.as_posix()}".endswith(f"/{name}") and path.is_file():
            return path
    carried = ", ".join(entry.name for entry in files if entry.suffix == ".gguf") or "none"
    raise InputError(f"{step}: the package {package} has no file {name} (its GGUF files: {carried}). Set target.gguf")


def _num_weights(file: Path, step: str) -> int:
    from gguf import GGUFReader

    try:
        return sum(int(tensor.n_elements) for tensor in GGUFReader(file).tensors)
    except (ValueError, IndexError, KeyError) as error:
        raise InputError(f"{step}: {file} is not a GGUF file: {_first_line(error)}. Set target.gguf") from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
