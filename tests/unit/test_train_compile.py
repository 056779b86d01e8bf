"""What is compiled before the first row serves every row: no graph is made later, none is that of the first row."""

import pytest
import torch
from torch._dynamo.utils import counters

from pipeline.train import loss as loss_module
from pipeline.train.data import Row, without_data
from pipeline.train.loop import Trainer
from tests.forecasting import make_trainer, small_run

TOKENS = 512
SUPERVISED = [(0, 512), (256, 512), (100, 105), (0, 0), (511, 512), (1, 300), (0, 512)]
"""From, to: none and few of them, too."""


@pytest.fixture
def trainer(tmp_path, monkeypatch) -> Trainer:
    monkeypatch.setattr(loss_module, "CHUNK_ROWS", 300)
    train = {"tokens_per_row": TOKENS, "autocast": False, "num_layers": 2}
    return make_trainer(*small_run(tmp_path, **train))


def make_row(trainer: Trainer, first: int, end: int) -> Row:
    row = without_data(trainer.train_rows.room(), [(0, 200), (200, TOKENS)])
    row.supervised_R.fill_(False)
    row.supervised_R[first:end] = True
    row.aux_RLH.normal_()
    row.last_RH.normal_()
    return row


def test_no_row_makes_a_graph_after_compile(trainer, capsys):
    torch._dynamo.reset()
    trainer.compile("aot_eager")
    assert all(parameter.grad is None for parameter in trainer.draft.parameters())
    graphs = counters["stats"]["unique_graphs"]
    for first, end in SUPERVISED:
        row = make_row(trainer, first, end)
        total, _ = trainer.module(row, None, False, trainer.weights_K)
        total.backward()
        with torch.no_grad():
            assert torch.isfinite(trainer.module(row, None, True)[1]).all()
        assert counters["stats"]["unique_graphs"] == graphs, f"{first} to {end}: compiled again"
    trainer._count_graphs(4)
    assert capsys.readouterr().err == ""
    for number in (1, 2):
        torch.compile(lambda x, number=number: x + number, backend="eager")(torch.ones(2))
        trainer._count_graphs(5)
        assert trainer.compiled_again == number
    assert capsys.readouterr().err.count("train  step 5 was compiled again") == 2
    torch._dynamo.reset()
