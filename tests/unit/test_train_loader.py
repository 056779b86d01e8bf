"""Rows read ahead: the same as without, in the same order, so many and no more; errors come where they belong."""

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.errors import InputError
from pipeline.store import claim, finish, run_key
from pipeline.store.dtypes import stored_dtype
from pipeline.store.samples import Sample
from pipeline.store.states import StatesReader, write_states
from pipeline.train.data import PADDING, Row, Rows, row_bytes
from pipeline.train.loader import RowsAhead

LENGTHS = [5, 9, 3, 12, 7, 1, 16, 4, 11, 6]
HIDDEN, LAYERS, ROW = 8, 3, 16
CPU = torch.device("cpu")


def make(folder: Path, store_dtype: str | None = None, dtype: torch.dtype = torch.bfloat16) -> StatesReader:
    """A hidden/ folder of random states in shards of four samples."""
    random = np.random.default_rng(0)
    samples = [
        Sample(f"s{n}", f"c{n}", random.integers(0, 99, size, dtype=np.int32), random.random(size) < 0.5)
        for n, size in enumerate(LENGTHS)
    ]
    inputs = {"test": 1}
    claim(folder, "extract", inputs)
    generator, shards = torch.Generator().manual_seed(0), []
    for first in range(0, len(samples), 4):
        part = samples[first : first + 4]
        tokens = sum(len(sample.input_ids_S) for sample in part)
        states = torch.randn(tokens, LAYERS + 1, HIDDEN, generator=generator).to(dtype)
        shards.append(
            write_states(
                folder / f"shard-{first:05d}.safetensors", part, states[:, :LAYERS].contiguous(),
                states[:, LAYERS].contiguous(), aux_layers=[2, 4, 6], last_layer=8, run_key=run_key(inputs),
                store_dtype=store_dtype,
            )
        )  # fmt: skip
    name = str(dtype).removeprefix("torch.")
    finish(folder, "extract", inputs, shards, {"aux_layers": [2, 4, 6], "hidden_size": HIDDEN, "dtype": name})
    return StatesReader(folder)


def rows_of(reader: StatesReader) -> Rows:
    return Rows(reader, list(range(len(LENGTHS))), ROW, 0, 1)


def equal(one: Row, two: Row) -> bool:
    tensors = [name for name, value in vars(one).items() if isinstance(value, torch.Tensor)]
    return one.documents == two.documents and all(torch.equal(getattr(one, t), getattr(two, t)) for t in tensors)


STORED = [(torch.bfloat16, None), (torch.float32, None), (torch.float32, "bf16"), (torch.bfloat16, "fp8")]


@pytest.mark.parametrize(("dtype", "store_dtype"), STORED)
def test_states_read_to_a_place_are_those_that_are_read_out(tmp_path, dtype, store_dtype):
    reader = make(tmp_path, store_dtype, dtype)
    for index, size in enumerate(LENGTHS):
        sample = reader.read(index)
        aux, last = torch.empty(size, LAYERS, HIDDEN, dtype=dtype), torch.empty(size, HIDDEN, dtype=dtype)
        ids, mask = reader.read_into(index, aux, last)
        assert torch.equal(aux, sample.aux_states_SLH)
        assert torch.equal(last, sample.last_states_SH)
        assert torch.equal(ids, sample.input_ids_S)
        assert torch.equal(mask, sample.loss_mask_S)


@pytest.mark.parametrize(("dtype", "store_dtype"), STORED)
@pytest.mark.parametrize("stored", [False, True])
def test_used_memory_leaves_no_trace_in_a_row(tmp_path, dtype, store_dtype, stored):
    """Nor does it matter whether it is decoded when it is read or later."""
    rows = rows_of(make(tmp_path, store_dtype, dtype))
    room = rows.room(stored=stored)
    for value in vars(room).values():
        if isinstance(value, torch.Tensor):
            value.fill_(1)
    for samples in ([3], [5], []):
        row = rows.load(samples, room).decoded(dtype)
        size = sum(LENGTHS[i] for i in samples)
        assert equal(row, rows.load(samples))
        assert (row.document_R[size:] == PADDING).all()
        assert not row.supervised_R[size:].any()
        assert not row.aux_RLH[size:].any()
        assert not row.supervised_R[max(0, size - 1)], "nothing comes after a sample's last token"


@pytest.mark.parametrize("store_dtype", [None, "fp8"])
def test_a_row_takes_what_is_said(tmp_path, store_dtype):
    room = rows_of(make(tmp_path, store_dtype)).room(stored=True)
    held = sum(value.nbytes for value in vars(room).values() if isinstance(value, torch.Tensor))
    stored = stored_dtype("bfloat16", store_dtype)
    assert held == row_bytes(ROW, LAYERS, HIDDEN, stored)
    documented = {None: 470e6, "fp8": 235e6}[store_dtype]
    assert row_bytes(8192, 3, 7168, stored) == pytest.approx(documented, rel=2e-3)


@pytest.mark.parametrize("ahead", [0, 1, 3, 100])
def test_the_order_is_kept_however_long_a_row_takes(tmp_path, monkeypatch, ahead):
    rows = rows_of(make(tmp_path))
    order = rows.of_epoch(0) + rows.of_epoch(1)
    alone = [rows.load(samples) for samples in order]
    original, random = Rows.load, np.random.default_rng(1)
    waits = {id(samples): float(random.random() / 50) for samples in order}

    def load(self, samples, room=None):
        time.sleep(waits[id(samples)])
        return original(self, samples, room)

    monkeypatch.setattr(Rows, "load", load)
    with RowsAhead(rows, order, ahead, CPU) as loader:
        for got, one in zip(loader, alone, strict=True):
            assert equal(got, one)
            loader.give_back(got)


def test_no_more_rows_are_read_than_may_be_ahead(tmp_path, monkeypatch):
    rows, begun, original = rows_of(make(tmp_path)), [], Rows.load

    def load(self, samples, room=None):
        begun.append(samples)
        return original(self, samples, room)

    monkeypatch.setattr(Rows, "load", load)
    order = rows.of_epoch(0)
    assert len(order) > 4
    with RowsAhead(rows, order, 2, CPU) as loader:
        time.sleep(0.1)
        assert len(begun) == 2
        next(loader)
        time.sleep(0.1)
        assert len(begun) == 3


def test_a_torn_shard_is_named_with_its_sample_where_its_row_is_taken(tmp_path):
    reader = make(tmp_path)
    torn = reader.manifest.shards[1].file
    path = tmp_path / torn
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 1000)
    rows, before = rows_of(reader), threading.active_count()
    with RowsAhead(rows, [[0], [1], [7], [2]], 4, CPU) as loader:
        next(loader)
        next(loader)
        with pytest.raises(InputError, match=rf"train: sample s7 in .*{torn} cannot be read \(it ends .* too early\)"):
            next(loader)
    assert threading.active_count() == before, "a thread is left"


def test_leaving_waits_for_no_more_than_what_is_being_read(tmp_path, monkeypatch):
    rows, original = rows_of(make(tmp_path)), Rows.load

    def load(self, samples, room=None):
        time.sleep(0.2)
        return original(self, samples, room)

    monkeypatch.setattr(Rows, "load", load)
    begun = time.monotonic()
    with pytest.raises(KeyboardInterrupt), RowsAhead(rows, rows.of_epoch(0) * 50, 100, CPU):
        raise KeyboardInterrupt
    assert time.monotonic() - begun < 2


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize(("dtype", "store_dtype"), STORED)
def test_rows_come_whole_to_a_gpu_though_memory_is_used_again(tmp_path, dtype, store_dtype):
    rows = rows_of(make(tmp_path, store_dtype, dtype))
    order = [samples for epoch in range(50) for samples in rows.of_epoch(epoch)]
    with RowsAhead(rows, order, 2, torch.device("cuda", 0)) as loader:
        for samples, row in zip(order, loader, strict=True):
            assert equal(row.to(CPU), rows.load(samples))
