"""Tensors as a safetensors file, written atomically and with equal bytes for equal tensors."""

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from pipeline.store.atomic import atomic_path, file_sha256


def write_tensors(
    path: Path, tensors: dict[str, torch.Tensor], metadata: tuple[str, str] | None = None
) -> tuple[int, str]:
    """Write `tensors` to `path` without a copy in memory. Returns the file's size in bytes and its SHA-256, taken
    before it has its name: what another process might put there is not vouched for. Raises OSError when the disk is
    full.

    `metadata` is one key and its text: safetensors writes several keys in random order. Its own temporary
    file (`.tmp` and six letters, left behind by a killed process) is only for its owner to read, and that
    would stay so: the mode is set to what any other new file gets.
    """
    with atomic_path(path) as temporary:
        temporary.touch()
        mode = temporary.stat().st_mode
        try:
            save_file(tensors, temporary, dict([metadata]) if metadata else None)
        except SafetensorError as error:
            raise _as_os_error(error, path) from error
        temporary.chmod(mode)
        size, sha256 = temporary.stat().st_size, file_sha256(temporary)
        assert size > sum(tensor.nbytes for tensor in tensors.values()), f"{temporary} is shorter than what was written"
    return size, sha256


def _as_os_error(error: SafetensorError, path: Path) -> OSError:
    """safetensors turns the operating system's error into text, `... (os error 28)`: give it back its number."""
    text = str(error)
    number = text.rpartition("(os error ")[2].partition(")")[0]
    return OSError(int(number) if number.isdigit() else 0, text, str(path))
