"""Our safetensors files against the library's."""

import errno
import hashlib
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.store import tensors
from pipeline.store.tensors import CODES, write_tensors
from tests.runs import small_file_system

TEXT = 'Zürich "quoted" \\ \n \x1f \x7f 鷹巣 🦅'
ONE_OF_EACH = {f"of {dtype}": torch.arange(7).to(dtype) for dtype in CODES}


@pytest.mark.parametrize(
    "values",
    [
        ONE_OF_EACH,
        {"b": torch.zeros(2, 3), "a": torch.ones(3, 0), 'é"': torch.tensor(3.5), "c": torch.ones(1, dtype=torch.int64)},
        {"apart": torch.arange(12.0).reshape(3, 4).T},
    ],
    ids=["every type", "shapes and names", "not contiguous"],
)
@pytest.mark.parametrize("metadata", [None, ("aerie", TEXT)], ids=["bare", "metadata"])
def test_files_are_the_librarys_to_the_byte(
    tmp_path: Path, values: dict[str, torch.Tensor], metadata: tuple[str, str] | None
):
    size, sha256 = write_tensors(tmp_path / "ours", values, metadata)
    save_file(
        {name: t.contiguous() for name, t in values.items()},
        tmp_path / "theirs",
        dict([metadata]) if metadata else None,
    )
    ours = (tmp_path / "ours").read_bytes()
    assert ours == (tmp_path / "theirs").read_bytes()
    assert (size, sha256) == (len(ours), hashlib.sha256(ours).hexdigest())
    for name, value in load_file(tmp_path / "ours").items():
        assert torch.equal(
            value.view(torch.uint8) if value.dim() else value,
            values[name].contiguous().view(torch.uint8) if value.dim() else values[name],
        )


def test_what_the_system_does_not_take_at_once_is_written_after_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write, taken = os.write, []

    def take_little(file: int, data: memoryview) -> int:
        taken.append(write(file, data[:1000]))
        return taken[-1]

    monkeypatch.setattr(tensors.os, "write", take_little)
    values = {"a": torch.randint(0, 255, (12_345,), dtype=torch.uint8)}
    size, sha256 = write_tensors(tmp_path / "ours", values)
    assert len(taken) > 12
    assert torch.equal(load_file(tmp_path / "ours")["a"], values["a"])
    assert hashlib.sha256((tmp_path / "ours").read_bytes()).hexdigest() == sha256
    assert size == (tmp_path / "ours").stat().st_size


def test_a_disk_that_fails_late_is_told_by_the_files_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Quotas and network file systems tell of it at fsync, without a name."""

    def fail(file: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(tensors.os, "fsync", fail)
    with pytest.raises(OSError, match="quota") as raised:
        write_tensors(tmp_path / "file", {"a": torch.zeros(3)})
    assert raised.value.filename == str(tmp_path / "file")
    assert not list(tmp_path.iterdir())


def test_no_file_is_left_whose_checksum_could_not_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(data: memoryview) -> None:
        raise MemoryError

    monkeypatch.setattr(tensors.hashlib, "sha256", lambda: SimpleNamespace(update=fail, hexdigest=lambda: "0"))
    with pytest.raises(MemoryError):
        write_tensors(tmp_path / "file", {"a": torch.zeros(3)})
    assert not list(tmp_path.iterdir())


def test_a_type_without_a_code_is_named(tmp_path: Path):
    with pytest.raises(AssertionError, match=r"odd is torch.complex64"):
        write_tensors(tmp_path / "file", {"odd": torch.zeros(3, dtype=torch.complex64)})


def test_a_full_disk_is_told_by_the_files_name(tmp_path: Path):
    with small_file_system(tmp_path / "disk", "1m") as folder:
        with pytest.raises(OSError, match="No space left on device") as raised:
            write_tensors(folder / "file", {"a": torch.zeros(1 << 20)})
        assert raised.value.errno == errno.ENOSPC
        assert raised.value.filename == str(folder / "file")
        assert not list(folder.iterdir())
