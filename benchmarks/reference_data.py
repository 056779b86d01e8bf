"""Our hidden states as the files that speculators 0.9.0's trainer reads.

    DATA/                    a Hugging Face data set: input_ids, loss_mask (int64), seq_len; a row is a sample
    DATA/hidden_states/      hs_N.safetensors of row N: token_ids [S], hidden_states [S, L + 1, H], the last state last
    DATA/d2t-D.npy, t2d-D.npy

Its layer ids, its last state (before the final norm) and its d2t mean what ours do. Its mask marks the tokens of the
answers, as ours, but it then trains at an index whose *input* token is marked, we where the token to be predicted is:
one index later in each answer.
"""

import json
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from pipeline.config import Run
from pipeline.errors import MismatchError
from pipeline.store import read_manifest
from pipeline.store.states import StatesReader, StatesSample
from pipeline.train.data import split_by_conversation
from pipeline.vocab import load_map

STATES = "hidden_states"
KEY = "made-of.json"
"""Written last."""


def convert(config: Run, reader: StatesReader, folder: Path) -> tuple[list[int], list[int]]:
    """Write a run's training samples and after them those for validation, unless `folder` holds them already.

    Returns the indices of both, as `train` has them. Raises MismatchError for a folder of other samples.
    """
    import datasets

    train, validation = split_by_conversation(reader.conversation_ids, config.train.validation_share, config.seed)
    vocab = read_manifest(config.folder("vocab"), "vocab").run_key
    key = {"hidden": reader.manifest.run_key, "vocab": vocab, "train": train, "validation": validation}
    if (folder / KEY).is_file():
        if json.loads((folder / KEY).read_text()) != key:
            raise MismatchError(f"bench: {folder} was made of another run. Give another --work; nothing was changed")
        return train, validation
    (folder / STATES).mkdir(parents=True, exist_ok=True)
    columns: dict[str, list] = {"input_ids": [], "loss_mask": [], "seq_len": []}
    for row, index in enumerate([*train, *validation]):
        sample = reader.read(index)
        save_file(tensors_of(sample), folder / STATES / f"hs_{row}.safetensors")
        columns["input_ids"].append(sample.input_ids_S.tolist())
        columns["loss_mask"].append(sample.loss_mask_S.long().tolist())
        columns["seq_len"].append(len(sample.input_ids_S))
    datasets.Dataset.from_dict(columns).with_format("torch").save_to_disk(folder)
    d2t_D, t2d_V = load_map(config.folder("vocab"))
    np.save(folder / f"d2t-{len(d2t_D)}.npy", d2t_D.numpy())
    np.save(folder / f"t2d-{len(d2t_D)}.npy", t2d_V.numpy())
    (folder / KEY).write_text(json.dumps(key))
    return train, validation


def tensors_of(sample: StatesSample) -> dict[str, torch.Tensor]:
    """The content of a sample's file."""
    states_SLH = torch.cat([sample.aux_states_SLH, sample.last_states_SH[:, None]], dim=1)
    return {"token_ids": sample.input_ids_S, "hidden_states": states_SLH}


def train_ratio(train: int, validation: int) -> float:
    """What makes the trainer, which cuts off int(rows * ratio) rows, take the first `train` rows."""
    return (train + 0.5) / (train + validation)
