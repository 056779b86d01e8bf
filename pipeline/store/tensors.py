"""Tensors as a safetensors file, written atomically and with equal bytes for equal tensors.

The file is written here, byte for byte as the library `safetensors` writes it (tests compare them), because extraction
cannot do with the library's way: before 0.8 it copies all tensors first and holds Python's lock while it writes, which
stops the model; and the checksum would take as long again, after it. Files are read by the library; `places` is for
who reads a part of one to where it is wanted.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from pipeline.store.atomic import atomic_path

CODES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""safetensors' code of each type, in the order in which it puts tensors into a file: by type, then by name."""
ORDER = list(CODES.values())
DTYPES = {code: dtype for dtype, code in CODES.items()}
LENGTH_BYTES = 8
"""A file begins with the length of its header, little-endian."""


@dataclass(frozen=True)
class Layout:
    """What a header says of one tensor."""

    name: str
    code: str
    shape: list[int]
    size_bytes: int

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> "Layout":
        assert tensor.dtype in CODES, f"{name} is {tensor.dtype}, which no file of ours has"
        return cls(name, CODES[tensor.dtype], list(tensor.shape), tensor.nbytes)

    @classmethod
    def planned(cls, name: str, code: str, shape: list[int], item_bytes: int) -> "Layout":
        return cls(name, code, shape, math.prod(shape) * item_bytes)


class Place(NamedTuple):
    """Where a tensor's first byte lies in a file, and its type."""

    start: int
    dtype: torch.dtype


def in_file_order(tensors: Iterable[Layout]) -> list[Layout]:
    """In the order in which a file holds them."""
    return sorted(tensors, key=lambda one: (ORDER.index(one.code), one.name))


def header_bytes(ordered: list[Layout], metadata: tuple[str, str] | None) -> bytes:
    """What comes before the tensors: its length, and JSON padded to a multiple of 8."""
    header: dict[str, object] = {"__metadata__": dict([metadata])} if metadata else {}
    end = 0
    for one in ordered:
        begin, end = end, end + one.size_bytes
        header[one.name] = {"dtype": one.code, "shape": one.shape, "data_offsets": [begin, end]}
    text = json.dumps(header, ensure_ascii=False, separators=(",", ":")).encode()
    text = text.ljust(-(-len(text) // 8) * 8)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def places(path: Path) -> dict[str, Place]:
    """Of each tensor of a file whose header the library has found whole; types that we do not write are left out."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(LENGTH_BYTES), "little")
        header: dict[str, Any] = json.loads(file.read(length))
    begin = LENGTH_BYTES + length
    return {
        name: Place(begin + one["data_offsets"][0], DTYPES[one["dtype"]])
        for name, one in header.items()
        if name != "__metadata__" and one["dtype"] in DTYPES
    }


def write_tensors(
    path: Path,
    tensors: dict[str, torch.Tensor],
    metadata: tuple[str, str] | None = None,
    *,
    checksum: bool = True,
) -> tuple[int, str]:
    """Write `tensors` to `path`; without a copy in memory, but for those that are not on the CPU, one at a time.
    Returns the file's size in bytes and its SHA-256, of the bytes in memory: a file that holds others is found out.
    It takes longer than a fast disk; without `checksum` it is empty.

    `metadata` is one key and its text. Raises OSError, naming `path`, when the disk is full or fails.
    """
    ordered = in_file_order(Layout.of(name, tensor) for name, tensor in tensors.items())
    digest, size, summed = hashlib.sha256(), 0, []
    # The checksum, which takes longer, is made while the disk takes the bytes: neither holds Python's lock
    with (
        atomic_path(path) as temporary,
        temporary.open("wb", buffering=0) as file,
        ThreadPoolExecutor(1, "checksum") as thread,
    ):
        for piece in (header_bytes(ordered, metadata), *(tensors[one.name] for one in ordered)):
            data = memoryview(piece) if isinstance(piece, bytes) else _bytes_of(piece)
            size += len(data)
            if checksum:
                summed.append(thread.submit(digest.update, data))
            with _naming(path):
                _write(file.fileno(), data)
            del data
            if checksum and isinstance(piece, torch.Tensor) and piece.device.type != "cpu":
                summed.pop().result()
        with _naming(path):
            os.fsync(file.fileno())  # here already, beside the checksum
        for one in summed:
            one.result()
    return size, digest.hexdigest()


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _write(file: int, data: memoryview) -> None:
    """All of it: Linux takes 2 GiB at a time."""
    while data:
        data = data[os.write(file, data) :]


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Tell of errors of a file that is known by its number alone."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
