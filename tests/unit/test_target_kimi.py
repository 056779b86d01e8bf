"""Kimi-K2.5's place in the table of families: the text model inside the wrapper, and the ids of its turns."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pipeline.config import TargetSection
from pipeline.errors import InputError
from pipeline.target import KIMI_K25, Target

BOS = 300
TEXT = {
    "vocab_size": 8,
    "hidden_size": 4,
    "num_hidden_layers": 61,
    "rms_norm_eps": 1e-5,
    "bos_token_id": BOS,
    "tie_word_embeddings": False,
}
HEAD, REST = "model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two shards, of which only the second one holds what turns states into words; the first one is no weight file."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": TEXT}))
    tensors = {
        "language_model.model.embed_tokens.weight": torch.arange(32.0).reshape(8, 4),
        "language_model.model.norm.weight": torch.arange(4.0),
        "language_model.lm_head.weight": torch.arange(32.0).reshape(8, 4) + 100,
    }
    save_file(tensors, tmp_path / HEAD)
    (tmp_path / REST).write_bytes(b"opened, and it fails")
    index = dict.fromkeys(tensors, HEAD) | {"language_model.model.layers.0.self_attn.o_proj.weight": REST}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return tmp_path


def target(folder: Path) -> Target:
    return Target(TargetSection(path=str(folder)))


def test_the_text_model_is_found_in_the_wrapper_and_one_shard_is_read(folder):
    found = target(folder)
    assert (found.num_layers, found.hidden_size, found.vocab_size) == (61, 4, 8)
    assert found.aux_layers(None) == [2, 30, 58]
    head = found.head()
    assert head.lm_head_VH[0, 0] == 100
    assert head.embedding_VH[7, 3] == 31
    assert head.norm_H.tolist() == [0, 1, 2, 3]


def test_a_wrapper_without_its_text_model_is_named(folder):
    (folder / "config.json").write_text(json.dumps({"model_type": "kimi_k25"}))
    with pytest.raises(InputError, match="has no text_config"):
        _ = target(folder).num_layers


class Tokenizer:
    """What the check sees of one: the ids of a text."""

    def __init__(self, **wrong: int | None):
        self.ids = {name: BOS + distance for name, distance in KIMI_K25.special_ids.items()} | wrong

    def __call__(self, text: str, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        found = self.ids[text]
        return {"input_ids": list(text.encode()) if found is None else [found]}


def test_kimis_own_ids_pass(folder):
    target(folder)._check_special_ids(Tokenizer())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"<|im_end|>": BOS + 1, "[EOS]": BOS + 2}, r"\[EOS\] as 302, and not as 301"),
        ({"<|im_middle|>": None}, r"<\|im_middle\|> as no token of its own \(13 ids\), and not as 317"),
        ({"</think>": BOS + 22}, "</think> as 322, and not as 323"),
    ],
)
def test_a_swapped_or_missing_id_is_named(folder, wrong, said):
    with pytest.raises(InputError, match=said):
        target(folder)._check_special_ids(Tokenizer(**wrong))
