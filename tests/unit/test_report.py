"""The report of a run at any stage, from manifests alone."""

import json

import pytest

from pipeline import report
from pipeline.__main__ import main
from pipeline.config import load
from pipeline.store import claim, finish, run_key
from tests.training import write_config

TOTALS = {
    "prepare": {"samples": 1480, "supervised_tokens": 43290, "rejected": {"no_answer": 3, "empty": 1}},
    "extract": {"size_bytes": 587_000_000},
    "vocab": {"coverage": 0.978, "draft_vocab_size": 8192},
    "train": {"steps": 1497, "tokens_per_second": 2173.4, "seconds": 243.2, "acceptance_length": 1.5678},
    "evaluate": {
        "acceptance_length": 1.4321,
        "acceptance_length_95": [1.38, 1.49],
        "acceptance_per_position": [0.29, 0.104, 0.026],
        "num_speculative_tokens": 3,
        "num_prompts": 48,
        "engine": "reference",
        "seconds": 89.0,
    },
}
INPUTS = {
    "prepare": {},
    "extract": {"prepared": "prepare"},
    "vocab": {"prepared": "prepare"},
    "train": {"hidden": "extract", "vocab": "vocab"},
    "evaluate": {"train": "train"},
}
DEMO_TABLE = """\
llama, draft of 1 layer, 8,192 words                                    11:30
  samples            1,480   (4 rejected: {run}/prepared/rejected.jsonl)
  supervised tokens  43,290   97.8% inside the draft vocabulary
  hidden states      0.59 GB   {run}/hidden
  training           1,497 steps, 2,173 tok/s   {run}/checkpoints
  acceptance length  1.43 of 4   (95 %: 1.38 to 1.49; by position 0.29 / 0.10 / 0.03)
                     48 held-out prompts, reference engine
  draft              {run}/checkpoints/best
  summary            {run}/evaluation/summary.json
  time               prepare 3:23, extract 2:04, vocab 0:08, train 4:03, evaluate 1:29"""
"""As the demo printed it before the report was made of the same code."""


@pytest.fixture
def run(tmp_path):
    """A run whose first `count` steps are finished. Call it again to go on; `totals` replace those above."""
    path = write_config(tmp_path / "run.toml", tmp_path / "models" / "llama")
    config = load(path)

    def make(count=5, **totals):
        keys: dict[str, str] = {}
        for name in list(report.FOLDERS)[:count]:
            folder = config.folder(report.FOLDERS[name])
            inputs = {key: keys[source] for key, source in INPUTS[name].items()} | {"step": name}
            keys[name] = run_key(inputs)
            claim(folder, name, inputs)
            finish(folder, name, inputs, [], TOTALS[name] | totals.get(name, {}))

    make.config, make.path, make.folder = config, path, tmp_path / "runs" / "test"
    return make


def shown(run, capsys, code=0) -> tuple[str, str]:
    assert main(["report", "--config", str(run.path)]) == code
    said = capsys.readouterr()
    return said.out, said.err


def test_the_demo_closes_as_before(run):
    run()
    seconds = dict(zip(report.FOLDERS, (203, 124, 8, 243, 89), strict=True))
    table = report.table(run.config, report.read_steps(run.config), 690, seconds)
    assert table == DEMO_TABLE.format(run=run.folder)


def test_a_finished_run_shows_the_same_with_the_times_that_manifests_hold(run, capsys):
    run()
    expected = DEMO_TABLE.format(run=run.folder).splitlines()
    expected[0] = "llama, draft of 1 layer, 8,192 words"
    expected[-1] = "  time               train 4:03, evaluate 1:29"
    assert shown(run, capsys)[0].splitlines() == expected


def test_states_in_fewer_bytes_are_named(run, capsys):
    run(extract={"store_dtype": "fp8"})
    assert "  hidden states      0.59 GB in fp8   " in shown(run, capsys)[0]


def test_speed_where_the_engine_measured_it(run, capsys):
    speed = {"tokens_per_second": 111.26, "tokens_per_second_without_draft": 80.0, "speedup": 1.39075}
    run(evaluate=speed)
    line = "  speed              111.3 tok/s, 80.0 tok/s without the draft (1.39 x)"
    assert line in shown(run, capsys)[0].splitlines()
    run(evaluate={"acceptance_length_95": None})
    assert "(95 %: nan to nan;" in shown(run, capsys)[0]


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_every_step_that_is_left_is_shown_with_what_to_do(run, capsys, count):
    run(count)
    out, err = shown(run, capsys)
    assert not err
    for number, name in enumerate(report.FOLDERS):
        assert (f"not done: run `python -m pipeline {name}` " in out) == (number >= count)
    assert ("43,290   97.8% inside" in out) == (count > 2)
    assert ("1.57 on validation samples" in out) == (count > 3)
    assert "evaluation/summary.json" not in out


def test_a_step_that_was_begun_is_not_one_that_was_not(run, capsys):
    claim(run.folder / "prepared", "prepare", {})
    out, _ = shown(run, capsys)
    assert "samples            begun, not done: run `python -m pipeline prepare`" in out
    assert "hidden states      not done: run `python -m pipeline extract`" in out


def test_a_run_with_nothing_is_one_line(run, capsys):
    out, err = shown(run, capsys, code=4)
    assert not out
    assert err == f"report: {run.folder} holds no step's output yet. Run `python -m pipeline prepare` first\n"


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.write_text("{"),
        lambda path: path.write_text("{}"),
        lambda path: path.write_text(path.read_text().replace('"run_key": "', '"run_key": "0')),
        lambda path: path.write_text(path.read_text().replace('"coverage"', '"covers"')),
        lambda path: path.write_text(json.dumps(json.loads(path.read_text()) | {"totals": {}})),
    ],
)
def test_a_manifest_that_cannot_be_used_is_named_and_the_rest_is_shown(run, capsys, spoil):
    run()
    path = run.folder / "vocab" / "manifest.json"
    spoil(path)
    out, err = shown(run, capsys, code=4)
    assert f"draft vocabulary   unknown: {path} cannot be used" in out
    assert "1.43 of 4" in out
    assert err.startswith("report: vocab: ")
    assert str(path) in err
    assert err.count("\n") == 1


def test_a_manifest_that_may_not_be_read(run, capsys, monkeypatch):
    run()

    def refused(folder, step):
        raise PermissionError(13, "Permission denied", str(folder))

    monkeypatch.setattr(report, "read_manifest", refused)
    _, err = shown(run, capsys, code=4)
    assert f"report: extract: {run.folder}/hidden/manifest.json cannot be read (Permission denied)" in err
    assert err.count("\n") == 5


def test_a_folder_made_again_under_its_successors_is_told(run, capsys):
    run()
    inputs = {"prepared": "another", "step": "extract"}
    finish(run.folder / "hidden", "extract", inputs, [], TOTALS["extract"])
    out, _ = shown(run, capsys)
    assert f"note               {run.folder}/hidden was made from another prepared/ than the one there now" in out
    assert f"note               {run.folder}/checkpoints was made from another hidden/ than the one there now" in out
    assert out.count("note ") == 2
