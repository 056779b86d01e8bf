"""Hidden states as safetensors shards of many samples.

T tokens of a shard, N samples, S tokens of one sample, L captured layers, H hidden size

input_ids           int32 [T]
loss_mask           bool  [T], true where the target's own words are to be predicted
offsets             int64 [N + 1], sample n is rows offsets[n] to offsets[n + 1]
aux_hidden_states   [T, L, H]: what enters the layers `aux_layers`
last_hidden_states  [T, H]: the last layer's output, before the final norm
aux_scales          float32 [T, L], last_scales [T]: of fp8 states alone; see encoding.py

States are in the run's dtype, or stored in fewer bytes (`extract.store_dtype`): then the header names the run's dtype,
in which they are read.

Layer ids follow vLLM's serving convention: id i is the input of decoder layer i. The header's metadata
holds one key, `aerie`, with JSON in it.
"""

import json
import os
from bisect import bisect_right
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from pipeline.errors import InputError
from pipeline.store.dtypes import Stored, is_encoded, stored_dtype
from pipeline.store.encoding import FP8, decode, encode_in_place
from pipeline.store.manifest import Manifest, Shard, read_manifest
from pipeline.store.samples import Sample
from pipeline.store.tensors import DTYPES, Layout, Place, header_bytes, in_file_order, places, write_tensors

FORMAT = 1
METADATA_KEY = "aerie"
RUN_KEY_DIGITS = 32
"""Length of pipeline.store.run_key's result."""


@dataclass(frozen=True)
class ShardHeader:
    """What a shard says about itself, as JSON in its metadata."""

    format: int
    run_key: str
    aux_layers: list[int]
    last_layer: int
    sample_ids: list[str]
    conversation_ids: list[str]
    dtype: str | None = None
    """What states are read as, where they are stored as something else: left out where they are not."""

    def to_text(self) -> str:
        """The JSON."""
        said = {name: value for name, value in asdict(self).items() if value is not None}
        return json.dumps(said, ensure_ascii=False)


@dataclass(frozen=True)
class StatesSample:
    """One sample on the CPU: int64 `input_ids_S`, bool `loss_mask_S`, states in the run's dtype however stored."""

    sample_id: str
    input_ids_S: torch.Tensor
    loss_mask_S: torch.Tensor
    aux_states_SLH: torch.Tensor
    last_states_SH: torch.Tensor


def write_states(
    path: Path,
    samples: list[Sample],
    aux_states_TLH: torch.Tensor,
    last_states_TH: torch.Tensor,
    *,
    aux_layers: list[int],
    last_layer: int,
    run_key: str,
    store_dtype: str | None = None,
) -> Shard:
    """Write the states of `samples`, one after the other in the rows, atomically. Equal input gives equal bytes.

    The tensors go to the file as they are, without a copy in memory; with `store_dtype` (`extract.store_dtype`) they
    are encoded where they are and must not be read afterwards. Raises OSError when the disk is full.
    """
    lengths = [len(sample.input_ids_S) for sample in samples]
    assert sum(lengths) == len(aux_states_TLH) == len(last_states_TH), "rows and tokens differ"
    assert aux_states_TLH.shape[1] == len(aux_layers), "layers and ids differ"
    dtype = str(aux_states_TLH.dtype).removeprefix("torch.")
    header = ShardHeader(
        FORMAT,
        run_key,
        aux_layers,
        last_layer,
        [sample.sample_id for sample in samples],
        [sample.conversation_id for sample in samples],
        dtype if is_encoded(dtype, store_dtype) else None,
    )
    tensors = {
        "input_ids": torch.from_numpy(np.concatenate([sample.input_ids_S for sample in samples]).astype(np.int32)),
        "loss_mask": torch.from_numpy(np.concatenate([sample.loss_mask_S for sample in samples]).astype(np.bool_)),
        "offsets": torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int64),
        **_states_tensors(aux_states_TLH, last_states_TH, stored_dtype(dtype, store_dtype) if header.dtype else None),
    }
    size_bytes, sha256 = write_tensors(path, tensors, (METADATA_KEY, header.to_text()))
    return Shard(path.name, len(samples), sum(lengths), size_bytes, sha256)


def _states_tensors(
    aux_states_TLH: torch.Tensor, last_states_TH: torch.Tensor, encoded: Stored | None
) -> dict[str, torch.Tensor]:
    states = {"aux": aux_states_TLH.contiguous(), "last": last_states_TH.contiguous()}
    if encoded is None:
        return {f"{name}_hidden_states": tensor for name, tensor in states.items()}
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in states.items():
        tensors[f"{name}_hidden_states"], scales = encode_in_place(tensor, encoded)
        if scales is not None:
            tensors[f"{name}_scales"] = scales
    return tensors


def shard_bytes(
    samples: int,
    tokens: int,
    names_bytes: int,
    *,
    aux_layers: list[int],
    last_layer: int,
    hidden_size: int,
    dtype: str,
    store_dtype: str | None = None,
) -> int:
    """Size of the file that `write_states` makes of so many samples and tokens, to the byte.

    `names_bytes` is that of all their sample and conversation ids in UTF-8, `dtype` that of the run (`target.dtype`).
    Ids with quotation marks or backslashes in them take a little more.
    """
    layers, stored = len(aux_layers), stored_dtype(dtype, store_dtype)
    tensors = [
        Layout.planned("input_ids", "I32", [tokens], 4),
        Layout.planned("loss_mask", "BOOL", [tokens], 1),
        Layout.planned("offsets", "I64", [samples + 1], 8),
        Layout.planned("aux_hidden_states", stored.code, [tokens, layers, hidden_size], stored.item_bytes),
        Layout.planned("last_hidden_states", stored.code, [tokens, hidden_size], stored.item_bytes),
    ]
    if stored.scale_bytes:
        tensors.append(Layout.planned("aux_scales", "F32", [tokens, layers], 4))
        tensors.append(Layout.planned("last_scales", "F32", [tokens], 4))
    read_as = dtype if is_encoded(dtype, store_dtype) else None
    about = ShardHeader(FORMAT, "0" * RUN_KEY_DIGITS, aux_layers, last_layer, [], [], read_as)
    separators = 2 * max(0, samples - 1) * len(", ")
    quotes = 4 * samples * len('\\"')
    names = "x" * (names_bytes + separators + quotes)
    header = header_bytes(in_file_order(tensors), (METADATA_KEY, about.to_text() + names))
    return len(header) + sum(tensor.size_bytes for tensor in tensors)


@dataclass(frozen=True)
class _Part:
    """What opening keeps of a shard: nothing that grows with the hidden size."""

    path: Path
    header: ShardHeader
    offsets: np.ndarray
    num_supervised: np.ndarray
    hidden_size: int
    dtype: torch.dtype
    """What states are read as."""
    places: dict[str, Place]


class StatesReader:
    """The samples of a finished `hidden/` folder, in prepared order, each read when asked for.

    Opening reads headers, offsets and masks, no states: 1 byte a token. Sizes are compared with the manifest,
    checksums are not (`pipeline.store.verify` does that). A reader may be sent to or forked into other processes.
    Raises InputError, naming the file, for an unfinished folder and for a missing, torn or foreign shard.
    """

    def __init__(self, folder: Path):
        self.manifest: Manifest = read_manifest(folder, "extract")
        self._parts = [_open_part(folder, shard, self.manifest) for shard in self.manifest.shards]
        self._first_N = np.cumsum([0, *(len(part.header.sample_ids) for part in self._parts)]).tolist()
        self.lengths_N = np.concatenate([np.diff(part.offsets) for part in self._parts] or [np.zeros(0, np.int64)])
        """Tokens of each sample, int64."""
        self.num_supervised_N = np.concatenate([part.num_supervised for part in self._parts] or [np.zeros(0, np.int64)])
        """Tokens of each sample that are to be predicted, int64."""
        self.sample_ids = [i for part in self._parts for i in part.header.sample_ids]
        self.conversation_ids = [i for part in self._parts for i in part.header.conversation_ids]

    @property
    def stored(self) -> torch.dtype:
        """What the files hold states as: `extract.store_dtype`, of all the same."""
        return self._parts[0].places["aux_hidden_states"].dtype

    @property
    def num_samples(self) -> int:
        return self._first_N[-1]

    def read(self, index: int) -> StatesSample:
        """Sample `index`, in memory of its own. Raises as `read_into` does."""
        number, row = self._locate(index)
        part, size = self._parts[number], int(self.lengths_N[index])
        aux_SLH = torch.empty(size, len(part.header.aux_layers), part.hidden_size, dtype=part.dtype)
        last_SH = torch.empty(size, part.hidden_size, dtype=part.dtype)
        input_ids_S, loss_mask_S = self.read_into(index, aux_SLH, last_SH)
        return StatesSample(part.header.sample_ids[row], input_ids_S, loss_mask_S, aux_SLH, last_SH)

    def origin(self, index: int) -> tuple[str, Path]:
        """The id of sample `index`, and the file that holds it: how a fault in it is told."""
        number, row = self._locate(index)
        part = self._parts[number]
        return part.header.sample_ids[row], part.path

    def read_into(
        self,
        index: int,
        aux_SLH: torch.Tensor,
        last_SH: torch.Tensor,
        scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Read the states of sample `index` to where they are wanted; returns its `input_ids_S` and `loss_mask_S`.

        The tensors, on the CPU and contiguous, have the sample's shape and the run's dtype; or the `stored` one, and
        `scales` [S, L] and [S] of fp8, to be decoded later. States go from the kernel to them without a copy between
        (fp8 that is decoded here: by way of as many bytes as the file has), and several threads may read at once:
        nothing is mapped or kept open, and neither reading nor decoding holds Python's lock. Raises
        InputError, naming sample and file, where the file cannot be read or has become shorter (a mapped one that does
        would end the process).
        """
        number, row = self._locate(index)
        part = self._parts[number]
        first, end = int(part.offsets[row]), int(part.offsets[row + 1])
        assert aux_SLH.shape[0] == last_SH.shape[0] == end - first, "another length than the sample's"
        try:
            descriptor = os.open(part.path, os.O_RDONLY)
            try:
                _read_states(descriptor, part, "aux", first, aux_SLH, scales and scales[0])
                _read_states(descriptor, part, "last", first, last_SH, scales and scales[1])
                ids = torch.empty(end - first, dtype=torch.int32)
                mask = torch.empty(end - first, dtype=torch.bool)
                _read_rows(descriptor, part, "input_ids", first, ids)
                _read_rows(descriptor, part, "loss_mask", first, mask)
            finally:
                os.close(descriptor)
        except (OSError, EOFError) as error:
            raise InputError(
                f"train: sample {part.header.sample_ids[row]} in {part.path} cannot be read ({error}). "
                "Run verify, then extract again: it makes damaged files again"
            ) from error
        return ids.to(torch.int64), mask

    def _locate(self, index: int) -> tuple[int, int]:
        """The shard of sample `index`, and which of that shard's samples it is. IndexError where there is none."""
        if not 0 <= index < self.num_samples:
            raise IndexError(f"sample {index} of {self.num_samples}")
        number = bisect_right(self._first_N, index) - 1
        return number, index - self._first_N[number]


def _read_states(
    descriptor: int, part: _Part, name: str, first: int, states: torch.Tensor, scales: torch.Tensor | None
) -> None:
    """Rows from `first` on of `name`'s states, decoded where they are stored as something else."""
    stored = part.places[f"{name}_hidden_states"][1]
    if stored == states.dtype:
        _read_rows(descriptor, part, f"{name}_hidden_states", first, states)
        if stored == FP8:
            assert scales is not None, "without them they could not be decoded"
            _read_rows(descriptor, part, f"{name}_scales", first, scales)
        return
    numbers = torch.empty(states.shape, dtype=stored)
    _read_rows(descriptor, part, f"{name}_hidden_states", first, numbers)
    if stored == FP8:
        scales = torch.empty(states.shape[:-1], dtype=torch.float32)
        _read_rows(descriptor, part, f"{name}_scales", first, scales)
    decode(numbers, scales, states.dtype, out=states)


def _read_rows(descriptor: int, part: _Part, name: str, first: int, to: torch.Tensor) -> None:
    """Fill `to` with the rows of a tensor from `first` on. Raises EOFError where the file ends before."""
    start, dtype = part.places[name]
    assert dtype == to.dtype, "bytes are read as they are"
    assert to.is_contiguous(), "bytes are read in one piece"
    bytes_of: Any = to.view(-1).view(torch.uint8).numpy()  # numpy's types do not say that they are buffers
    room = memoryview(bytes_of)
    at = start + first * (to[0].numel() * to.element_size())
    while room:
        if not (size := os.preadv(descriptor, [room], at)):
            raise EOFError(f"it ends {len(room):,} bytes too early")
        room, at = room[size:], at + size


def check_shard(folder: Path, shard: Shard, manifest: Manifest) -> None:
    """Raise InputError, naming the file, unless it is there, whole by its size, and of this run. No states are read."""
    _open_part(folder, shard, manifest)


def _open_part(folder: Path, shard: Shard, manifest: Manifest) -> _Part:
    path = folder / shard.file
    if not path.is_file():
        raise _unusable(path, "is missing")
    if path.stat().st_size != shard.size_bytes:
        raise _unusable(path, f"has {path.stat().st_size} bytes, its manifest says {shard.size_bytes}")
    file = _open(path)
    try:
        header = ShardHeader(**json.loads((file.metadata() or {})[METADATA_KEY]))
        offsets = file.get_tensor("offsets").numpy().copy()
        mask = file.get_tensor("loss_mask").numpy()
        names = ["input_ids", "aux_hidden_states", "last_hidden_states"]
        if "F8_E4M3" in [file.get_slice(name).get_dtype() for name in names]:
            names += ["aux_scales", "last_scales"]
        shapes = [file.get_slice(name).get_shape() for name in names]
        placed = places(path)
        dtype = DTYPES[stored_dtype(header.dtype, None).code] if header.dtype else placed["aux_hidden_states"].dtype
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise _unusable(path, f"holds no states of this format ({error})") from None
    if header.format != FORMAT:
        raise _unusable(path, f"has format {header.format}, this version reads {FORMAT}")
    if header.run_key != manifest.run_key:
        raise _unusable(path, f"belongs to run key {header.run_key[:12]}, its manifest to {manifest.run_key[:12]}")
    tokens, layers, hidden = shard.tokens, len(header.aux_layers), shapes[2][-1]
    wanted = [[tokens], [tokens, layers, hidden], [tokens, hidden], [tokens, layers], [tokens]]
    fits = shapes == wanted[: len(shapes)] and (header.dtype is not None or len(shapes) == 3)
    lengths = np.diff(offsets)
    if not fits or len(mask) != tokens or offsets[0] != 0 or offsets[-1] != tokens or (lengths < 1).any():
        raise _unusable(path, "has tensors that do not fit its manifest")
    if not len(lengths) == len(header.sample_ids) == len(header.conversation_ids) == shard.samples:
        raise _unusable(path, "has other samples than its manifest")
    supervised = np.concatenate([[0], np.cumsum(mask, dtype=np.int64)])
    return _Part(path, header, offsets, np.diff(supervised[offsets]), hidden, dtype, placed)


def _open(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt").__enter__()  # maps the file; dropping the object unmaps it
    except (SafetensorError, OSError) as error:
        raise _unusable(path, f"cannot be read ({error})") from None


def _unusable(path: Path, what: str) -> InputError:
    return InputError(f"extract: {path} {what}. Run extract again: it makes this file again")
