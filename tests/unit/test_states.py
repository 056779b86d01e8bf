"""Hidden-state shards: what is written is what is read, and nothing else is taken for it."""

import itertools
import json
import multiprocessing
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open

from pipeline.errors import InputError
from pipeline.store import file_sha256, finish, read_manifest, run_key
from pipeline.store.samples import Sample
from pipeline.store.states import StatesReader, shard_bytes, write_states

LAYERS, LAST, HIDDEN = [1, 2, 3], 4, 8
INPUTS = {"aux_layers": LAYERS}


def make_samples(lengths: list[int], first: int = 0) -> list[Sample]:
    random = np.random.default_rng(first)
    return [
        Sample(
            f"sample-{first + n}",
            f"conversation-{(first + n) // 2}",
            random.integers(0, 300, length).astype(np.int32),
            random.random(length) < 0.5,
        )
        for n, length in enumerate(lengths)
    ]


def states_of(samples: list[Sample], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(len(samples))
    tokens = sum(len(sample.input_ids_S) for sample in samples)
    return torch.randn(tokens, 3, HIDDEN).to(dtype), torch.randn(tokens, HIDDEN).to(dtype)


def write_folder(
    folder: Path, shards: list[list[Sample]], dtype: torch.dtype = torch.float32, store_dtype: str | None = None
):
    folder.mkdir(parents=True, exist_ok=True)
    states = [states_of(samples, dtype) for samples in shards]
    lines = [
        write_states(
            folder / f"shard-{number:05d}.safetensors",
            samples,
            *(tensor.clone() for tensor in states[number]),
            aux_layers=LAYERS,
            last_layer=LAST,
            run_key=run_key(INPUTS),
            store_dtype=store_dtype,
        )
        for number, samples in enumerate(shards)
    ]
    finish(folder, "extract", INPUTS, lines, {})
    return states


SHARDS = [make_samples([3, 1, 5]), make_samples([7], first=3), make_samples([2, 2], first=4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_sample_is_read_as_it_was_written(tmp_path: Path, dtype: torch.dtype):
    states = write_folder(tmp_path, SHARDS, dtype)
    reader = StatesReader(tmp_path)
    samples = [sample for shard in SHARDS for sample in shard]
    assert reader.num_samples == 6
    assert reader.sample_ids == [sample.sample_id for sample in samples]
    assert reader.conversation_ids == [sample.conversation_id for sample in samples]
    assert reader.lengths_N.tolist() == [3, 1, 5, 7, 2, 2]
    assert reader.num_supervised_N.tolist() == [int(sample.loss_mask_S.sum()) for sample in samples]
    aux_TLH = torch.cat([aux for aux, _ in states])
    last_TH = torch.cat([last for _, last in states])
    ends = np.cumsum(reader.lengths_N)
    for index in [5, 0, 3, 2, 1, 4]:
        rows = slice(ends[index] - reader.lengths_N[index], ends[index])
        sample = reader.read(index)
        assert sample.sample_id == samples[index].sample_id
        assert sample.input_ids_S.dtype == torch.int64
        assert sample.input_ids_S.tolist() == samples[index].input_ids_S.tolist()
        assert sample.loss_mask_S.dtype == torch.bool
        assert sample.loss_mask_S.tolist() == samples[index].loss_mask_S.tolist()
        assert torch.equal(sample.aux_states_SLH, aux_TLH[rows])
        assert torch.equal(sample.last_states_SH, last_TH[rows])
        assert sample.aux_states_SLH.dtype == dtype


@pytest.mark.parametrize("store_dtype", ["bf16", "fp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_states_stored_in_fewer_bytes_are_read_in_the_runs_dtype(tmp_path: Path, dtype: torch.dtype, store_dtype: str):
    """Each sample, wherever its rows are; the files hold nothing of that dtype."""
    states = write_folder(tmp_path, SHARDS, dtype, store_dtype)
    reader, index = StatesReader(tmp_path), 0
    for samples, (aux_TLH, last_TH) in zip(SHARDS, states, strict=True):
        rows = np.cumsum([0, *(len(sample.input_ids_S) for sample in samples)])
        for begin, end in itertools.pairwise(rows):
            sample = reader.read(index)
            for got, want in ((sample.aux_states_SLH, aux_TLH[begin:end]), (sample.last_states_SH, last_TH[begin:end])):
                assert got.dtype == dtype
                assert got.shape == want.shape
                if store_dtype == "bf16":
                    assert torch.equal(got, want.bfloat16().to(dtype))
                else:
                    assert 0 < float((got - want).float().norm() / want.float().norm()) < 0.05
            index += 1
    with safe_open(tmp_path / "shard-00000.safetensors", "pt") as file:
        assert file.get_slice("aux_hidden_states").get_dtype() == {"bf16": "BF16", "fp8": "F8_E4M3"}[store_dtype]
        assert ("aux_scales" in file.keys()) == (store_dtype == "fp8")  # noqa: SIM118


@pytest.mark.parametrize("store_dtype", [None, "bf16", "fp8"])
def test_the_size_is_known_to_the_byte(tmp_path: Path, store_dtype: str | None):
    """For all lengths up to 60: where tensors begin is written in digits, so their order matters now and then."""
    for dtype, tokens in itertools.product(("float32", "bfloat16", "float16"), range(1, 61)):
        (sample,) = make_samples([tokens])
        states = states_of([sample], getattr(torch, dtype))
        layers = {"aux_layers": LAYERS, "last_layer": LAST}
        shard = write_states(
            tmp_path / "shard", [sample], *states, run_key=run_key(INPUTS), store_dtype=store_dtype, **layers
        )
        names_bytes = len(sample.sample_id) + len(sample.conversation_id)
        known = shard_bytes(1, tokens, names_bytes, hidden_size=HIDDEN, dtype=dtype, store_dtype=store_dtype, **layers)
        assert known == shard.size_bytes, (dtype, tokens)


def test_what_is_stored_as_computed_says_nothing_of_it(tmp_path: Path):
    """Bytes are those of folders from before there was a choice, and those are read."""
    write_folder(tmp_path / "a", SHARDS, torch.bfloat16)
    write_folder(tmp_path / "b", SHARDS, torch.bfloat16, "bf16")
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()
    with safe_open(tmp_path / "a" / "shard-00000.safetensors", "pt") as file:
        assert list(json.loads(file.metadata()["aerie"])) == [
            "format", "run_key", "aux_layers", "last_layer", "sample_ids", "conversation_ids",
        ]  # fmt: skip


def test_a_sample_does_not_hold_its_shard_in_memory(tmp_path: Path):
    """A view would: sent to another process, it would take the whole shard along."""
    write_folder(tmp_path, SHARDS)
    sample = StatesReader(tmp_path).read(1)
    for tensor in (sample.aux_states_SLH, sample.last_states_SH, sample.loss_mask_S):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes


def test_index_out_of_range(tmp_path: Path):
    write_folder(tmp_path, SHARDS)
    for index in (-1, 6):
        with pytest.raises(IndexError):
            StatesReader(tmp_path).read(index)


WRITE = """
import sys, torch, numpy as np
from pathlib import Path
sys.path.insert(0, {tests!r})
from test_states import SHARDS, write_folder
write_folder(Path(sys.argv[1]), SHARDS)
"""


def test_equal_states_give_equal_bytes_in_every_process(tmp_path: Path):
    write_folder(tmp_path / "here", SHARDS)
    for number in range(2):
        command = [sys.executable, "-c", WRITE.format(tests=str(Path(__file__).parent)), str(tmp_path / str(number))]
        subprocess.run(command, check=True, cwd=Path(__file__).parents[2])
        for file in (tmp_path / "here").iterdir():
            assert file_sha256(file) == file_sha256(tmp_path / str(number) / file.name), file.name


def test_a_shard_may_be_read_by_others(tmp_path: Path):
    write_folder(tmp_path, SHARDS)
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "shard-00000.safetensors").stat().st_mode & 0o777 == 0o666 & ~umask
    assert sorted(file.name for file in tmp_path.iterdir()) == [
        "manifest.json",
        *(f"shard-0000{n}.safetensors" for n in range(3)),
    ]


def test_reader_goes_to_other_processes(tmp_path: Path):
    write_folder(tmp_path, SHARDS)
    reader = StatesReader(tmp_path)
    want = reader.read(4).last_states_SH
    assert torch.equal(pickle.loads(pickle.dumps(reader)).read(4).last_states_SH, want)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(_sum_of, (reader, 4)) == float(want.sum())


def _sum_of(reader: StatesReader, index: int) -> float:
    return float(reader.read(index).last_states_SH.sum())


def test_opening_reads_no_states(tmp_path: Path):
    """11.7 TB of them at Kimi's size. Pages of mapped files that were touched count as resident."""
    samples = make_samples([4000])
    states = torch.zeros(4000, 4, 1000)
    line = write_states(
        tmp_path / "shard-00000.safetensors",
        samples,
        states[:, :3],
        states[:, 3],
        aux_layers=LAYERS,
        last_layer=LAST,
        run_key=run_key(INPUTS),
    )
    finish(tmp_path, "extract", INPUTS, [line], {})
    before = _mapped_bytes()
    StatesReader(tmp_path)
    assert _mapped_bytes() - before < line.size_bytes / 20
    with safe_open(tmp_path / line.file, "pt") as file:
        file.get_tensor("aux_hidden_states").sum()
        assert _mapped_bytes() - before > line.size_bytes / 2, "the measure does not see what is read"


def _mapped_bytes() -> int:
    """Of files, those on a tmpfs included."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return 1024 * sum(int(line[1]) for line in lines if line[0] in ("RssFile:", "RssShmem:"))


class TestUnusable:
    """Each is one line that names the file."""

    shard = "shard-00001.safetensors"

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        write_folder(tmp_path, SHARDS)
        return tmp_path

    def refused(self, folder: Path, *words: str) -> None:
        with pytest.raises(InputError) as error:
            StatesReader(folder)
        assert "\n" not in str(error.value)
        for word in (str(folder), *words):
            assert word in str(error.value)

    def test_no_manifest(self, folder: Path):
        (folder / "manifest.json").unlink()
        self.refused(folder, "not finished", "Run the extract step first")

    def test_missing(self, folder: Path):
        (folder / self.shard).unlink()
        self.refused(folder, self.shard, "is missing")

    def test_torn(self, folder: Path):
        with (folder / self.shard).open("r+b") as file:
            file.truncate(file.seek(0, 2) // 2)
        self.refused(folder, self.shard, "bytes")

    def test_not_safetensors(self, folder: Path):
        (folder / self.shard).write_bytes(b"\xff" * (folder / self.shard).stat().st_size)
        self.refused(folder, self.shard, "cannot be read")

    def test_other_safetensors(self, folder: Path):
        self.replaced(folder, {"weight": torch.ones(3)}, None)
        self.refused(folder, self.shard, "no states of this format")

    def test_later_format(self, folder: Path):
        self.replaced(folder, {}, {"format": 2})
        self.refused(folder, self.shard, "format 2")

    def test_foreign_run(self, folder: Path):
        self.replaced(folder, {}, {"run_key": "0123456789abcdef"})
        self.refused(folder, self.shard, "0123456789ab")

    def test_other_shapes(self, folder: Path):
        self.replaced(folder, {"last_hidden_states": torch.ones(6, HIDDEN)}, {})
        self.refused(folder, self.shard, "do not fit")

    @pytest.mark.parametrize("name", ["aux", "last"])
    def test_scales_that_do_not_fit(self, folder: Path, name: str):
        write_folder(folder, SHARDS, store_dtype="fp8")
        self.replaced(folder, {f"{name}_scales": torch.ones(6)}, {})
        self.refused(folder, self.shard, "do not fit")

    @pytest.mark.parametrize("dtype", ["int7", None])
    def test_states_that_are_read_as_nothing_known(self, folder: Path, dtype: str | None):
        write_folder(folder, SHARDS, store_dtype="fp8")
        self.replaced(folder, {}, {"dtype": dtype})
        self.refused(folder, self.shard, "no states of this format" if dtype else "do not fit")

    def test_offsets_that_skip_rows(self, folder: Path):
        self.replaced(folder, {"offsets": torch.tensor([1, 7])}, {})
        self.refused(folder, self.shard, "do not fit")

    def test_other_samples(self, folder: Path):
        self.replaced(folder, {}, {"sample_ids": ["a", "b"]})
        self.refused(folder, self.shard, "other samples")

    def replaced(self, folder: Path, tensors: dict[str, torch.Tensor], header: dict | None) -> None:
        """Put a changed file in the shard's place, with a manifest whose size fits."""
        from safetensors.torch import save_file

        path = folder / self.shard
        with safe_open(path, "pt") as file:
            old = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118
            metadata = json.loads(file.metadata()["aerie"])
        new = tensors if header is None else {**old, **tensors}
        save_file(new, path, None if header is None else {"aerie": json.dumps({**metadata, **header})})
        lines = list(read_manifest(folder, "extract").shards)
        lines[1] = replace(lines[1], size_bytes=path.stat().st_size)
        finish(folder, "extract", INPUTS, lines, {})
