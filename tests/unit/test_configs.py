"""The configurations that are shipped: they load, and Kimi-K2.5's makes the draft that public Kimi drafts are."""

import re
from pathlib import Path

import pytest

from pipeline.config import load
from pipeline.forecast.shapes import RECORDED
from pipeline.target import Target
from pipeline.train.draft import draft_config

ROOT = Path(__file__).parents[2]
KIMI = ROOT / "configs" / "kimi-k2.5.toml"


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_it_loads_and_its_name_is_its_files(path: Path):
    assert load(path).name == path.stem


def test_every_number_of_kimis_is_explained():
    lines = [line for line in KIMI.read_text().splitlines() if re.search(r"^\w+ = .*\d", line)]
    assert len(lines) > 20
    assert not [line for line in lines if "  # " not in line and not line.startswith("name")]


def test_the_draft_for_kimi():
    """moonshotai/Kimi-K2.5's own shapes (forecast/recorded) and the file's numbers."""
    config = load(KIMI)
    target = Target.at(config.target, RECORDED / "moonshotai--Kimi-K2.5")
    aux = target.aux_layers(config.extract.aux_layers)
    draft = draft_config(target, config.train, aux, config.vocab.draft_vocab_size)
    assert aux == target.aux_layers(None) == [2, 30, 58]
    assert (draft.hidden_size, draft.intermediate_size, draft.num_hidden_layers) == (7168, 18432, 1)
    assert (draft.num_attention_heads, draft.num_key_value_heads, draft.head_dim) == (64, 64, 128)
    assert (draft.vocab_size, draft.draft_vocab_size) == (163840, 32000)
    assert (draft.rms_norm_eps, draft.rope_theta, draft.max_position_embeddings) == (1e-5, 50000.0, 262144)
    assert draft.rope_scaling == {
        "rope_type": "yarn",
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    assert config.train.rows_per_step % config.target.tensor_parallel_size == 0, "a GPU would compute an empty row"
