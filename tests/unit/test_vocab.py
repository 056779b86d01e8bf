"""The draft's words: control tokens, then what is said most; d2t and t2d name the same words."""

import json
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from pipeline import vocab
from pipeline.__main__ import main
from pipeline.errors import InputError
from pipeline.store import finish
from pipeline.store.samples import Sample, write_samples
from tests.models import VOCAB_SIZE, save_tokenizer

warnings.simplefilter("error")

CONTROL = [256, 257, 258]


@pytest.fixture
def run(tmp_path):
    """A run with a target of 320 words, of which 3 are control tokens. Call it with samples (ids, mask) and flags."""
    (model := tmp_path / "model").mkdir()
    save_tokenizer(model)
    (model / "config.json").write_text(json.dumps({"vocab_size": VOCAB_SIZE, "eos_token_id": 258, "hidden_size": 8}))
    config = tmp_path / "run.toml"
    config.write_text(
        f'name = "r"\nruns_dir = "{tmp_path}/runs"\n[target]\npath = "{model}"\nmax_length = 64\n[prepare]\n'
        'sources = ["x"]\n[vocab]\ndraft_vocab_size = 16\n'
    )
    folder = tmp_path / "runs" / "r"

    def call(samples=None, *flags: str) -> int:
        if samples is not None:
            rows = [Sample(f"s{i}", f"s{i}", np.asarray(ids, np.int32), np.asarray(mask, bool))
                    for i, (ids, mask) in enumerate(samples)]  # fmt: skip
            (folder / "prepared").mkdir(parents=True, exist_ok=True)
            shards = [write_samples(folder / "prepared" / "samples-00000.parquet", rows)]
            finish(folder / "prepared", "prepare", {"data": str(samples)}, shards, {})
        return main(["vocab", "--config", str(config), *flags])

    call.folder = folder
    return call


def words(folder) -> list[int]:
    d2t_D, _ = vocab.load_map(folder / "vocab")
    return (torch.arange(len(d2t_D)) + d2t_D).tolist()


def test_control_then_supervised_then_prompts_then_low_ids(run, capsys):
    ids = [9, 9, 9, 50, 60, 60, 70, 70, 70, 258]
    mask = [False, False, False, False, True, True, True, True, True, True]
    assert run([(ids, mask)], "--vocab.draft_vocab_size", "8") == 0
    assert words(run.folder) == sorted([*CONTROL, 70, 60, 9, 50, 0])
    assert "vocab  8 of 320 words hold 100.0 % of 6 supervised tokens" in capsys.readouterr().out
    totals = json.loads((run.folder / "vocab" / "manifest.json").read_text())["totals"]
    assert (totals["coverage"], totals["supervised_tokens"]) == (1.0, 6)


def test_control_tokens_are_in_before_any_word(run):
    assert run([([5] * 10 + [6], [True] * 11)], "--vocab.draft_vocab_size", "4") == 0
    assert words(run.folder) == [5, *CONTROL]
    assert json.loads((run.folder / "vocab" / "manifest.json").read_text())["totals"]["coverage"] == 10 / 11


def test_ties_go_to_the_lower_id(run):
    assert run([([40, 30, 20, 10], [True] * 4)], "--vocab.draft_vocab_size", "5") == 0
    assert words(run.folder) == [10, 20, *CONTROL]


def test_the_whole_vocabulary_is_the_identity(run):
    assert run([([1, 2], [True, True])], "--vocab.draft_vocab_size", str(VOCAB_SIZE)) == 0
    d2t_D, t2d_V = vocab.load_map(run.folder / "vocab")
    assert not d2t_D.any()
    assert t2d_V.all()


def test_done_is_done_and_other_settings_are_refused(run, capsys):
    samples = [([1, 2], [True, True])]
    assert run(samples) == 0
    before = (run.folder / "vocab" / vocab.FILE).read_bytes()
    assert run() == 0
    assert "already done" in capsys.readouterr().out
    assert run(None, "--vocab.draft_vocab_size", "17") == 3
    assert "draft_vocab_size 16, this run has 17" in capsys.readouterr().err
    assert run([([1, 3], [True, True])]) == 3
    assert (run.folder / "vocab" / vocab.FILE).read_bytes() == before


@pytest.mark.parametrize(
    ("samples", "flags", "code", "message"),
    [
        ([([1], [True])], ["--vocab.draft_vocab_size", "321"], 2, "321 is more than the target's 320 words"),
        ([([1], [True])], ["--vocab.draft_vocab_size", "2"], 2, "3 control tokens"),
        ([([1, 320], [True, True])], [], 4, "token id 320, the target has 320 words"),
        ([([1, -1], [True, True])], [], 4, "token id -1"),
        ([([1], [False])], [], 4, "no supervised token"),
        (None, [], 4, "not finished"),
    ],
)
def test_bad_input_is_one_line(run, capsys, samples, flags, code, message):
    assert run(samples, *flags) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (run.folder / "vocab" / "manifest.json").exists()


def test_size_is_checked_before_data_are_read(run, capsys):
    assert run(None, "--vocab.draft_vocab_size", "321") == 2
    assert not run.folder.exists()


def test_a_map_that_is_none_is_refused(run):
    run([([1, 2], [True, True])])
    folder, path = run.folder / "vocab", run.folder / "vocab" / vocab.FILE
    good = load_file(path)
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    with pytest.raises(InputError, match="checksum"):
        vocab.load_map(folder)
    for bad in ({"d2t": good["d2t"] + 1, "t2d": good["t2d"]}, {"d2t": good["d2t"]}):
        save_file(bad, path)
        finish(folder, "vocab", {}, [vocab.Shard.describe(path, 0, 0)], {})
        with pytest.raises(InputError, match="Run vocab again"):
            vocab.load_map(folder)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_choice_against_brute_force(data):
    size = data.draw(st.integers(1, 30))
    counts = st.lists(st.integers(0, 3), min_size=size, max_size=size)
    supervised_V, other_V = np.array(data.draw(counts)), np.array(data.draw(counts))
    control = data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=size))
    wanted = data.draw(st.integers(max(1, len(control)), size))
    words_D = vocab.choose_words(wanted, control, supervised_V, other_V)
    best = sorted(range(size), key=lambda i: (i not in control, -supervised_V[i], -other_V[i], i))[:wanted]
    assert words_D.tolist() == sorted(best)


def test_counts_do_not_depend_on_chunks(run, monkeypatch):
    rng = np.random.default_rng(0)
    samples = [(rng.integers(0, VOCAB_SIZE, n), rng.random(n) < 0.5) for n in (1, 7, 100, 3, 50)]
    samples[0][1][:] = True
    run(samples)
    ids, mask = np.concatenate([s[0] for s in samples]), np.concatenate([s[1] for s in samples])
    for chunk in (1, 10, 1 << 20):
        monkeypatch.setattr(vocab, "COUNT_TOKENS", chunk)
        supervised_V, other_V = vocab.count_tokens(run.folder / "prepared", VOCAB_SIZE)
        assert supervised_V.tolist() == [int(((ids == i) & mask).sum()) for i in range(VOCAB_SIZE)]
        assert other_V.tolist() == [int(((ids == i) & ~mask).sum()) for i in range(VOCAB_SIZE)]
