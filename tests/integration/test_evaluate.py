"""The evaluate step as a user runs it, and its counting against decoding step by step."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline import engine, train, vocab
from pipeline.__main__ import main
from pipeline.config import Run, load
from pipeline.evaluate.counts import Counts, Question
from pipeline.evaluate.reference import ReferenceEngine
from pipeline.evaluate.step import _inputs
from pipeline.target import Target
from tests.models import Reference
from tests.training import greedy_answers, make_hidden, write_config

PROMPTS = [np.random.default_rng(n).integers(0, 250, 8 + n).tolist() for n in range(6)]
LENGTH = 40
TRAIN = {"epochs": 40, "learning_rate": 2e-3, "validation_share": 0.0, "checkpoint_steps": 100_000}


@pytest.fixture(scope="module")
def finished(tmp_path_factory, llama_folder) -> tuple[Path, Run]:
    """A run with a draft that is right about half of the time, and held-out prompts."""
    folder = tmp_path_factory.mktemp("evaluate")
    prompts = [{"prompt": text} for text in ("Hello", "Grüße, 世界", "1 + 1?")] + [{"prompt": ""}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    section = {"prompts": [str(folder / "prompts.jsonl")], "max_new_tokens": 20}
    path = write_config(folder / "run.toml", llama_folder, train=TRAIN, evaluate=section)
    config, reference = load(path), Reference(llama_folder)
    make_hidden(config, reference, PROMPTS, greedy_answers(reference, PROMPTS, LENGTH))
    vocab.run(config)
    train.run(config)
    return path, config


def evaluate(path: Path, *flags: str) -> int:
    return main(["evaluate", "--config", str(path), *flags])


def decoded_step_by_step(engine: ReferenceEngine, model, prompt: list[int], question: Question) -> Counts:
    """Speculative decoding written out: draft from the verified tokens, on the draft's own words; ask the target."""

    def target_says(ids: list[int]) -> int:
        return int(model(torch.tensor([ids])).logits[0, -1].argmax())

    ids, accepted, drafts = [*prompt, target_says(prompt)], [0] * question.num_speculative_tokens, 0
    while len(ids) - len(prompt) < question.max_new_tokens and ids[-1] not in question.stop_ids:
        states = model(torch.tensor([ids[:-1]]), output_hidden_states=True).hidden_states
        aux_SLH = torch.stack([states[layer][0] for layer in engine.aux_layers], dim=1)
        size = len(ids) - 1
        chain = engine.draft.begin(aux_SLH, torch.arange(size), [(0, size)])
        tokens, proposed = torch.tensor(ids[1:]), []
        for _ in range(question.num_speculative_tokens):
            hidden_SH = engine.draft.advance(chain, tokens)
            proposed.append(int(engine.kept_D[engine.draft.logits(hidden_SH)[-1].argmax()]))
            tokens = torch.cat([tokens[1:], torch.tensor(proposed[-1:])])
        drafts += 1
        for position, token in enumerate(proposed):
            said = target_says(ids)
            ids.append(said)
            if said != token:
                break
            accepted[position] += 1
        else:
            ids.append(target_says(ids))
        ended = [i for i, token in enumerate(ids[len(prompt) :]) if token in question.stop_ids]
        if ended:
            break
    return Counts(drafts, accepted)


@torch.no_grad()
def test_counts_equal_decoding_step_by_step(finished):
    _, config = finished
    target = Target(config.target)
    engine = ReferenceEngine(target, config.folder("checkpoints") / "best")
    answers = greedy_answers(Reference(target.folder), PROMPTS, LENGTH)
    stop = answers[0][17]  # so that an answer ends by a stop token, too
    question = Question(PROMPTS, [stop], 3, 24, 0.0, 0)
    outcome = engine.answer(question)
    assert 1.5 < outcome.total.acceptance_length < 3.9, "this draft should fail now and then"
    assert any(answer[-1] == stop for answer in outcome.answers)
    for prompt, counts in zip(PROMPTS, outcome.counts, strict=True):
        want = decoded_step_by_step(engine, engine.model, prompt, question)
        assert (counts.num_drafts, counts.num_accepted_tokens_per_pos) == (
            want.num_drafts,
            want.num_accepted_tokens_per_pos,
        )


def test_sampled_answers_are_seeded_and_differ(finished):
    _, config = finished
    engine = ReferenceEngine(Target(config.target), config.folder("checkpoints") / "best")
    one, same, other = (engine.answer(Question(PROMPTS, [], 3, 20, 0.8, seed)) for seed in (1, 1, 2))
    assert one.answers == same.answers != other.answers
    assert one.total.num_accepted_tokens_per_pos == same.total.num_accepted_tokens_per_pos


def test_the_step_writes_a_summary_once(finished, capsys):
    path, config = finished
    assert evaluate(path, "--evaluate.engine", "reference") == 0
    shown = capsys.readouterr()
    assert "acceptance length" in shown.out
    assert "left out" in shown.err
    assert "line 4" in shown.err
    summary = json.loads((config.folder("evaluation") / "summary.json").read_text())
    wanted = {"acceptance_length", "acceptance_per_position", "num_draft_tokens", "num_drafts", "engine"}
    assert wanted <= summary.keys()
    assert (summary["num_prompts"], summary["num_rejected_prompts"], summary["engine"]) == (3, 1, "reference")
    assert summary["num_draft_tokens"] == 3 * summary["num_drafts"]
    assert evaluate(path, "--evaluate.engine", "reference") == 0
    assert "already done" in capsys.readouterr().out
    assert evaluate(path, "--evaluate.engine", "reference", "--evaluate.temperature", "1") == 3
    assert "was made with temperature 0.0, this run has 1.0" in capsys.readouterr().err


def test_what_changes_the_measure_is_in_the_key(finished, monkeypatch):
    """An edited template or another vLLM behind evaluate.python would be told "already done"."""
    _, config = finished
    monkeypatch.setattr(engine, "identity", lambda python: f"vLLM of {python}")
    target = Target(config.target)
    by_vllm = _inputs(config, target, "key", "vllm")
    assert by_vllm["vllm"] == f"vLLM of {config.evaluate.python}"
    assert by_vllm["tokenizer"] == target.tokenizer_fingerprint
    assert "vllm" not in _inputs(config, target, "key", "reference")
    silent = config.target.model_copy(update={"thinking": False})
    other = _inputs(config.model_copy(update={"target": silent}), target, "key", "vllm")
    assert {key for key in other if other[key] != by_vllm[key]} == {"thinking"}


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["--evaluate.prompts", "[]"], 2, "evaluate.prompts is empty"),
        (["--evaluate.prompts", '["missing.jsonl"]'], 4, "evaluate: missing.jsonl: no such file"),
        (["--evaluate.engine", "vllm"], 2, "cannot decode speculatively without a GPU"),
        (["--evaluate.python", "/no/python"], 2, "evaluate.python /no/python cannot be run"),
        (["--evaluate.max_new_tokens", "99999"], 4, "do not fit the target's 2304 positions"),
        (["--runs_dir", "nowhere"], 4, "is not finished (no manifest.json). Run the train step first"),
    ],
)
def test_bad_input_is_one_line_and_does_not_stand_in_the_way(finished, tmp_path, flags, code, message, capsys):
    path, config = finished
    (tmp_path / "test").mkdir()
    (tmp_path / "test" / "checkpoints").symlink_to(config.folder("checkpoints"))
    place = [] if "--runs_dir" in flags else ["--runs_dir", str(tmp_path)]
    assert evaluate(path, *place, *flags) == code
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    if "vllm" in flags or "/no/python" in flags:
        assert evaluate(path, *place, "--evaluate.engine", "reference") == 0, "what the message advises"
