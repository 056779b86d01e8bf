"""What a wrong call is told: one line, and exit code 2."""

from pathlib import Path

import pytest

from pipeline.__main__ import _nested, _value, main
from pipeline.config import load

CONFIG = ["--config", "configs/smollm2-135m.toml"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "the following arguments are required: STEP"),
        (["preprae"], "invalid choice: 'preprae'"),
        (["prepare"], "the following arguments are required: --config"),
        (["train", *CONFIG, "--train.epoch", "2"], "train: --train.epoch 2: no such key"),
        (["versions", *CONFIG], "versions: --config configs/smollm2-135m.toml: no such key"),
        (["prepare", *CONFIG, "--prepare.sources", "x.jsonl"], """as a flag for example '["x.jsonl"]'"""),
        (["prepare", "--config", "none.toml"], "none.toml: no such file"),
    ],
)
def test_a_wrong_call_is_one_line(arguments, said, capsys, monkeypatch):
    monkeypatch.delenv("AERIE_CONFIG", raising=False)
    try:
        code = main(arguments)
    except SystemExit as end:  # argparse's own
        code = end.code
    assert code == 2
    out, error = capsys.readouterr()
    assert said in error
    assert error.count("\n") == 1
    assert not out


def test_what_the_list_hint_shows_is_taken():
    flags = _nested({"prepare.sources": _value('["x.jsonl"]')})
    assert load(Path(CONFIG[1]), flags).prepare.sources == ["x.jsonl"]
