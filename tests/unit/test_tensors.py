"""Our safetensors files against the library's."""

import errno
import hashlib
from pathlib import Path

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


def test_a_file_is_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tensors, "WRITE_BYTES", 1000)
    values = {"a": torch.randint(0, 255, (12_345,), dtype=torch.uint8)}
    size, sha256 = write_tensors(tmp_path / "ours", values)
    assert torch.equal(load_file(tmp_path / "ours")["a"], values["a"])
    assert hashlib.sha256((tmp_path / "ours").read_bytes()).hexdigest() == sha256
    assert size == (tmp_path / "ours").stat().st_size


def test_a_full_disk_is_told_by_the_files_name(tmp_path: Path):
    with small_file_system(tmp_path / "disk", "1m") as folder:
        with pytest.raises(OSError, match="No space left on device") as raised:
            write_tensors(folder / "file", {"a": torch.zeros(1 << 20)})
        assert raised.value.errno == errno.ENOSPC
        assert raised.value.filename == str(folder / "file")
        assert not list(folder.iterdir())
