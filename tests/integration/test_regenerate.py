"""Regenerated answers are the target's own, token by token, and survive a kill. Real engine, tiny random target."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pipeline.config import TargetSection
from pipeline.prepare import regenerate
from pipeline.store.samples import read_samples
from pipeline.target import Target

pytest.importorskip("vllm")

QUESTIONS = [f"Question {i}: what is {i * 7919}?" + " Say more." * (i % 5) for i in range(96)]
MAX_NEW_TOKENS = 48
MAX_LENGTH = 112
"""Short enough that the longest questions leave room for fewer than MAX_NEW_TOKENS."""


def write_config(folder: Path, model: Path, questions: list[str], **prepare) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps({"id": name_of(q), "prompt": q}) + "\n" for q in questions))
    keys = {"max_new_tokens": MAX_NEW_TOKENS, **prepare}
    lines = [f"{key} = {json.dumps(value)}" for key, value in keys.items()]
    config = folder / "run.toml"
    config.write_text(
        f'name = "r"\nruns_dir = "{folder}"\n[target]\npath = "{model}"\ndtype = "float32"\n'
        f'max_length = {MAX_LENGTH}\n[prepare]\nsources = ["{data}"]\n' + "\n".join(lines) + "\n"
    )
    return config


def start(config: Path) -> subprocess.Popen:
    command = [sys.executable, "-m", "pipeline", "prepare", "--config", str(config)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def prepare(config: Path) -> Path:
    """Run to the end. Returns the prepared folder."""
    process = start(config)
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, out + err
    return config.parent / "r" / "prepared"


def files(folder: Path) -> dict[str, bytes]:
    """The bytes of everything that a finished folder has."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


def answers(folder: Path) -> dict[str, list[int]]:
    return {s.sample_id: s.input_ids_S[s.loss_mask_S].tolist() for s in read_samples(folder)}


@pytest.fixture(scope="module")
def target(llama_folder, tmp_path_factory) -> Path:
    """The tiny Llama, for which some forty words more end a turn: its greedy answers would never end otherwise."""
    folder = tmp_path_factory.mktemp("target") / "llama"
    shutil.copytree(llama_folder, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [258, *range(40)]}))
    return folder


@pytest.fixture(scope="module")
def undisturbed(target, tmp_path_factory) -> Path:
    return prepare(write_config(tmp_path_factory.mktemp("undisturbed"), target, QUESTIONS))


def test_greedy_answers_equal_those_of_transformers(undisturbed, target):
    """Every id, the end-of-turn token included; nothing is tokenised a second time."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(target)
    end_ids = Target(TargetSection(path=str(target))).end_of_turn_ids
    samples = {sample.sample_id: sample for sample in read_samples(undisturbed)}
    empty, cut = [], 0
    for question in QUESTIONS:
        prompt = tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)
        answer = greedy(model, prompt, end_ids)
        if len(answer) == 1 and answer[0] in end_ids:
            empty.append(name_of(question))
            continue
        sample = samples.pop(name_of(question))
        assert sample.input_ids_S.tolist() == prompt + answer
        assert sample.loss_mask_S.tolist() == [False] * len(prompt) + [True] * len(answer)
        assert not {*end_ids} & {*answer[:-1]}
        cut += answer[-1] not in end_ids
    assert not samples
    totals = json.loads((undisturbed / "manifest.json").read_text())["totals"]
    assert totals["truncated_answers"] == cut
    assert totals["rejected"].get("empty_answer", 0) == len(empty)
    rejected = [json.loads(line) for line in (undisturbed / "rejected.jsonl").read_text().splitlines()]
    assert [(r["id"], r["row"]) for r in rejected] == [(name, int(name.split()[1]) + 1) for name in empty]
    assert 0 < cut < totals["samples"], "the test needs answers of both kinds"


def greedy(model, prompt: list[int], end_ids: list[int]) -> list[int]:
    """The answer by transformers' greedy search."""
    room = min(MAX_NEW_TOKENS, MAX_LENGTH - len(prompt))
    with torch.no_grad():
        out = model.generate(
            torch.tensor([prompt]), do_sample=False, max_new_tokens=room, eos_token_id=end_ids, pad_token_id=256
        )
    return out[0, len(prompt) :].tolist()


def name_of(question: str) -> str:
    return question.split(":")[0]


def test_a_killed_run_goes_on_and_ends_with_the_same_bytes(undisturbed, target, tmp_path):
    config = write_config(tmp_path, target, QUESTIONS, max_num_seqs=8)
    journal = tmp_path / "r" / "prepared" / regenerate.JOURNAL
    process = start(config)
    deadline = time.monotonic() + 300
    while not (journal.exists() and journal.read_bytes().count(b"\n") >= 20):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    done = journal.read_bytes()
    assert 20 <= done.count(b"\n") < len(QUESTIONS), "killed too late to show anything"
    assert not (journal.parent / "manifest.json").exists()
    journal.write_bytes(done[:-5])  # the last line torn, as by a machine that lost its power

    folder = prepare(config)
    assert not journal.exists()
    assert files(folder) == files(undisturbed)


def test_a_seed_makes_answers_independent_of_order_and_batch(target, tmp_path):
    some = QUESTIONS[:40]
    sampled = {"temperature": 1.0, "top_p": 0.95}
    one = answers(prepare(write_config(tmp_path / "one", target, some, max_num_seqs=64, **sampled)))
    two = answers(prepare(write_config(tmp_path / "two", target, some[::-1], max_num_seqs=3, **sampled)))
    assert one == two
    assert len({tuple(a[:8]) for a in one.values()}) > len(some) // 2  # and they are not all the same draw
