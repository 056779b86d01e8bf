"""Plan, result, errors and progress of the step extract."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.errors import InputError
from pipeline.extract.plan import Limits, plan
from pipeline.extract.speculators_engine import groups
from pipeline.store import read_manifest
from pipeline.store.samples import Sample
from pipeline.store.states import StatesReader
from tests.extraction import FILES, HIDDEN, LENGTHS, NUM_LAYERS, SHARD_TOKENS, StandIn, extract, killed_at
from tests.runs import contents, errors, make_samples, write_prepared

# ---- Plan


def test_plan_covers_all_samples_in_order_and_keeps_to_the_size(tmp_path: Path):
    write_prepared(tmp_path, make_samples(LENGTHS))
    planned = plan(tmp_path, SHARD_TOKENS, Limits(300, 64))
    want = [(2, 31), (1, 50), (1, 20), (1, 45), (1, 60), (2, 10)]
    assert [(shard.samples, shard.tokens) for shard in planned] == want
    assert [shard.file for shard in planned] == FILES
    assert sum(shard.supervised for shard in planned) == sum(s.loss_mask_S.sum() for s in make_samples(LENGTHS))


def test_sample_larger_than_a_shard_has_its_own(tmp_path: Path):
    write_prepared(tmp_path, make_samples([3, 50, 3]))
    planned = plan(tmp_path, 10, Limits(300, 64))
    assert [shard.tokens for shard in planned] == [3, 50, 3]


def test_groups_keep_to_both_limits():
    samples = make_samples([5, 5, 5, 20, 1, 1, 1, 1])
    got = [[len(sample.input_ids_S) for sample in group] for group in groups(samples, 12, 3)]
    assert got == [[5, 5], [5], [20], [1, 1, 1], [1]]
    assert list(groups([], 12, 3)) == []


# ---- What is left behind


def test_states_are_read_back(config: Path, hidden: Path):
    assert extract(config) == 0
    reader = StatesReader(hidden)
    for index, sample in enumerate(make_samples(LENGTHS)):
        got = reader.read(index)
        ids_S = got.input_ids_S
        assert ids_S.tolist() == sample.input_ids_S.tolist()
        for slot, layer in enumerate([2, 4, 5]):
            want = torch.sin(ids_S[:, None] * (layer + 1.0) + torch.arange(HIDDEN))
            assert torch.equal(got.aux_states_SLH[:, slot], want)
        assert torch.equal(got.last_states_SH, torch.sin(ids_S[:, None] * (NUM_LAYERS + 1.0) + torch.arange(HIDDEN)))
    assert reader.manifest.totals["supervised_tokens"] == int(reader.num_supervised_N.sum())


def test_finished_folder_starts_no_engine(config: Path, stand_in: type[StandIn], capsys: pytest.CaptureFixture[str]):
    assert extract(config) == 0
    assert extract(config) == 0
    assert stand_in.started == stand_in.closed == 1
    assert "already done" in capsys.readouterr().out


# ---- Bad input


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = errors(capsys.readouterr().err)
    assert line.startswith("extract: ") or line.startswith("prepare: ")
    return line


def test_unfinished_prepared_folder(config: Path, hidden: Path, capsys: pytest.CaptureFixture[str]):
    (hidden.parent / "prepared" / "manifest.json").unlink()
    assert extract(config) == 4
    assert "is not finished (no manifest.json). Run the prepare step first" in one_line(capsys)
    assert not hidden.exists()


@pytest.mark.parametrize("layers", ["[2, 4, 9]", "[1, 2, 100]", "[2, 4, 8]"])
def test_layer_out_of_range(config: Path, hidden: Path, layers: str, capsys: pytest.CaptureFixture[str]):
    assert extract(config, "--extract.aux_layers", layers) == 4
    assert "which has 8 layers" in one_line(capsys)
    assert not hidden.exists()


def test_the_embeddings_output_cannot_be_served(config: Path, hidden: Path, capsys: pytest.CaptureFixture[str]):
    """vLLM adds a residual at each captured layer, and layer 0 has none."""
    assert extract(config, "--extract.aux_layers", "[0, 1, 5]") == 2
    assert "the first at least 1" in capsys.readouterr().err
    assert not hidden.exists()


def test_the_outermost_layers_that_can_be_served(config: Path, hidden: Path):
    assert extract(config, "--extract.aux_layers", "[1, 2, 7]") == 0
    assert StatesReader(hidden).read(2).aux_states_SLH.shape[1] == 3


@pytest.mark.parametrize(
    ("ids", "mask", "words"),
    [
        ([1, 300], [True, True], "token id 300, the target knows 0 to 299"),
        ([-1, 1], [True, True], "token id -1"),
        ([], [], "has 0 tokens"),
        ([1] * 65, [True] * 65, "has 65 tokens, 1 to 64"),
        ([1, 2], [True], "2 tokens and 1 mask values"),
    ],
)
def test_sample_that_the_target_cannot_take(
    config: Path, hidden: Path, ids: list[int], mask: list[bool], words: str, capsys: pytest.CaptureFixture[str]
):
    bad = Sample("the-bad-one", "c", np.array(ids, np.int32), np.array(mask, bool))
    write_prepared(hidden.parent / "prepared", [*make_samples([4, 5]), bad])
    assert extract(config) == 4
    line = one_line(capsys)
    assert "sample the-bad-one has " in line
    assert words in line
    assert not contents(hidden), "nothing is claimed for settings that did not work"


def test_no_samples(config: Path, hidden: Path, capsys: pytest.CaptureFixture[str]):
    write_prepared(hidden.parent / "prepared", [])
    assert extract(config) == 4
    assert "holds no samples" in one_line(capsys)


def test_other_settings_are_refused(config: Path, hidden: Path, capsys: pytest.CaptureFixture[str]):
    assert killed_at(config, 8)
    before = contents(hidden)
    assert extract(config, "--extract.aux_layers", "[1, 2, 3]") == 3
    message = capsys.readouterr().err
    assert "was made with aux_layers [2, 4, 5], this run has [1, 2, 3]" in message
    assert contents(hidden) == before
    write_prepared(hidden.parent / "prepared", make_samples([3, 4]), "another")
    assert extract(config) == 3
    assert "was made with prepared" in capsys.readouterr().err
    assert contents(hidden) == before


def test_unpatched_speculators_is_told(monkeypatch: pytest.MonkeyPatch):
    from pipeline import patching
    from pipeline.extract.versions import engine_versions

    def pristine(action: str, package: str) -> str:
        raise patching.PatchingError(5, "speculators is pristine, not patched: run apply speculators")

    monkeypatch.setattr(patching, "run", pristine)
    with pytest.raises(InputError, match=r"not patched.*make setup"):
        engine_versions()


def test_manifest_names_what_made_it(config: Path, hidden: Path):
    assert extract(config) == 0
    assert sorted(read_manifest(hidden, "extract").inputs) == [
        "aux_layers",
        "dtype",
        "engine",
        "engine_version",
        "last_layer",
        "max_length",
        "patches",
        "prepared",
        "shard_tokens",
        "target",
    ]
