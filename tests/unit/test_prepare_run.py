"""The step as a user runs it, without an engine: what it writes, what it says, how it ends."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.__main__ import main
from pipeline.config import Run, load
from pipeline.prepare import output, regenerate, sources
from pipeline.prepare.rejects import Rejected
from pipeline.prepare.spool import SpooledPrompt, read_prompts, write_prompts
from pipeline.store.samples import Sample, read_samples
from tests.models import CHAT_TEMPLATE, VOCAB_SIZE, save_tokenizer
from tests.unit import prepare_tokenizers

END = 258


def talk(question: str, answer: str = "yes", **more) -> str:
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": messages, **more}, ensure_ascii=False)


class Case:
    """A run in a folder of its own. `prepare` returns the exit code."""

    def __init__(self, folder: Path):
        self.folder, self.model, self.data = folder, folder / "model", folder / "data.jsonl"
        self.model.mkdir()
        save_tokenizer(self.model)
        config = {"vocab_size": VOCAB_SIZE, "eos_token_id": END, "hidden_size": 8}
        (self.model / "config.json").write_text(json.dumps(config))
        self.config = folder / "run.toml"
        self.config.write_text(
            f'name = "r"\nruns_dir = "{folder}/runs"\n[target]\npath = "{self.model}"\nmax_length = 100\n'
            f'[prepare]\nsources = ["{self.data}"]\nregenerate = false\n'
        )
        self.out = folder / "runs" / "r" / "prepared"

    def write(self, *lines: str) -> "Case":
        self.data.write_text("\n".join(lines) + "\n")
        return self

    def prepare(self, *flags: str) -> int:
        return main(["prepare", "--config", str(self.config), *flags])

    def samples(self) -> list[Sample]:
        return list(read_samples(self.out))

    def rejected(self) -> list[dict]:
        return [json.loads(line) for line in (self.out / "rejected.jsonl").read_text().splitlines()]

    def totals(self) -> dict:
        return json.loads((self.out / "manifest.json").read_text())["totals"]


@pytest.fixture
def case(tmp_path):
    return Case(tmp_path)


def test_a_folder_of_samples(case, capsys):
    assert case.write(talk("a", id="one"), "{", talk("b", "ß 你 🙂", id="two"), talk("a")).prepare() == 0
    one, two = case.samples()
    assert (one.sample_id, two.sample_id) == ("one", "two")
    assert one.input_ids_S[one.loss_mask_S][-1] == END
    assert two.loss_mask_S.sum() == len("ß 你 🙂".encode()) + 1
    assert [(r["row"], r["code"]) for r in case.rejected()] == [(2, "json"), (4, "duplicate")]
    assert case.rejected()[0]["source"] == str(case.data)
    totals = case.totals()
    assert (totals["rows"], totals["conversations"], totals["samples"]) == (4, 2, 2)
    assert totals["rejected"] == {"duplicate": 1, "json": 1}
    assert totals["tokens"] == len(one.input_ids_S) + len(two.input_ids_S)
    assert totals["supervised_tokens"] == one.loss_mask_S.sum() + two.loss_mask_S.sum()
    said = capsys.readouterr().out
    assert "2 rejected (duplicate 1, json 1: rejected.jsonl)" in said
    assert str(case.out) in said


def test_again_is_nothing_to_do_and_other_settings_are_refused(case, capsys):
    case.write(talk("a"))
    assert case.prepare() == 0
    files = {path.name: path.read_bytes() for path in case.out.iterdir()}
    assert case.prepare() == 0
    assert "already done" in capsys.readouterr().out
    assert case.prepare("--target.max_length", "99") == 3
    assert "max_length 100, this run has 99" in capsys.readouterr().err
    (case.model / "model.safetensors").write_bytes(b"hashed only")
    assert case.prepare("--prepare.regenerate", "true") == 3  # which brings other settings into the key
    assert "regenerate False, this run has True" in capsys.readouterr().err
    case.write(talk("other"))
    assert case.prepare() == 3
    assert {p.name: p.read_bytes() for p in case.out.iterdir() if p.name != ".lock"} == {
        name: data for name, data in files.items() if name != ".lock"
    }


def test_a_changed_file_is_not_taken_for_finished(case, capsys):
    case.write(talk("a"))
    assert case.prepare() == 0
    shard = case.out / "samples-00000.parquet"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    assert case.prepare() == 4
    assert "checksum" in capsys.readouterr().err


def test_long_samples_are_cut_and_counted(case):
    case.write(talk("x", "y" * 500, id="cut"), talk("x" * 100, id="no room"), talk("x", "short", id="whole"))
    assert case.prepare() == 0
    cut, whole = case.samples()
    assert len(cut.input_ids_S) == 100
    assert cut.loss_mask_S[-1]
    assert cut.input_ids_S[-1] != END  # the answer did not end here, so the draft must not learn that it did
    assert whole.sample_id == "whole"
    totals = case.totals()
    full = len(whole.input_ids_S) - len("short") + 500
    assert (totals["truncated_samples"], totals["truncated_tokens"]) == (1, full - 100)
    assert [(r["id"], r["code"]) for r in case.rejected()] == [("no room", "prompt_too_long")]


def test_a_prompt_that_just_fits(case):
    overhead = len(prompt_ids(case, ""))
    case.write(talk("x" * (99 - overhead), id="fits"), talk("x" * (100 - overhead), id="not"))
    assert case.prepare() == 0
    assert [s.loss_mask_S.sum() for s in case.samples()] == [1]
    assert [r["id"] for r in case.rejected()] == ["not"]


def prompt_ids(case: Case, question: str) -> list[int]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(case.model)
    return tokenizer.apply_chat_template([{"role": "user", "content": question}], add_generation_prompt=True)


def test_many_shards(case, monkeypatch):
    monkeypatch.setattr(output, "SHARD_SAMPLES", 7)
    case.write(*(talk(f"q{i}", id=str(i)) for i in range(20)))
    (case.out).mkdir(parents=True)
    (case.out / "samples-00009.parquet").write_bytes(b"left by an earlier attempt")
    assert case.prepare() == 0
    assert sorted(p.name for p in case.out.glob("*.parquet")) == [f"samples-0000{i}.parquet" for i in range(3)]
    assert [s.sample_id for s in case.samples()] == [str(i) for i in range(20)]


def test_limit_counts_conversations(case):
    case.write("{", *(talk(f"q{i}", id=str(i)) for i in range(20)))
    assert case.prepare("--prepare.limit", "3") == 0
    assert [s.sample_id for s in case.samples()] == ["0", "1", "2"]


def test_a_slow_tokenizer_that_comes_with_the_model(case, capsys):
    """Kimi's is such a one: code in the model's folder, no offsets. 0.3.0 of speculators drops every row of it."""
    shutil.copy(prepare_tokenizers.__file__, case.model / "tokenization_slow.py")
    for name in ("tokenizer.json", "special_tokens_map.json", "chat_template.jinja"):
        (case.model / name).unlink(missing_ok=True)
    auto = {"AutoTokenizer": ["tokenization_slow.SlowTokenizer", None]}
    config = {"tokenizer_class": "SlowTokenizer", "auto_map": auto, "chat_template": CHAT_TEMPLATE}
    (case.model / "tokenizer_config.json").write_text(json.dumps(config))
    case.write(talk("hi", "ß"))
    assert case.prepare() == 4
    assert "trust_remote_code" in capsys.readouterr().err
    allowed = ("--target.trust_remote_code", "true")
    assert case.prepare(*allowed) == 2
    pin = re.search('set target.code_sha256 = "([0-9a-f]{64})"', capsys.readouterr().err)
    assert pin
    assert case.prepare(*allowed, "--target.code_sha256", pin[1]) == 0
    (sample,) = case.samples()
    assert sample.input_ids_S[sample.loss_mask_S].tolist() == [*"ß".encode(), 256]  # its end-of-turn token

    with (case.model / "tokenization_slow.py").open("a") as file:
        file.write("raise SystemExit('changed code has run')\n")
    assert case.prepare(*allowed, "--target.code_sha256", pin[1], "--name", "again") == 2
    assert f"is not the one pinned ({pin[1]})" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lines", "flags", "code", "message"),
    [
        ([], ["--prepare.sources", '["/nowhere/x.jsonl"]'], 4, "/nowhere/x.jsonl does not exist"),
        ([], ["--prepare.format", "x"], 2, None),
        ([], [], 4, "has no rows"),
        (["{", "[]"], [], 4, "all 2 rows were rejected"),
        ([talk("x" * 200)], [], 4, "'prompt_too_long'"),
        ([talk("x")], ["--target.path", "/nowhere"], 4, "/nowhere is not a folder"),
    ],
)
def test_bad_input_is_one_line(case, capsys, lines, flags, code, message):
    case.data.write_text("".join(line + "\n" for line in lines))
    if message is None:
        with pytest.raises(SystemExit) as caught:
            case.prepare(*flags)
        assert caught.value.code == code
        return
    assert case.prepare(*flags) == code
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not (case.out / "manifest.json").exists()
    case.write(talk("good"))  # a run that kept nothing does not stand in the way of the corrected one
    assert case.prepare() == 0


@pytest.mark.parametrize("weights", [False, True])
def test_regenerating_nothing_starts_no_engine(case, capsys, weights):
    if weights:
        (case.model / "model.safetensors").write_bytes(b"read by the engine only")
    case.write("{", talk("x" * 200))
    assert case.prepare("--prepare.regenerate", "true") == 4
    error = capsys.readouterr().err
    assert ("all 2 rows were rejected" if weights else "has no weights") in error
    assert error.count("\n") == 1
    if weights:
        assert [r["code"] for r in case.rejected()] == ["json", "prompt_too_long"]
    assert case.write(talk("good")).prepare() == 0
    assert not list(case.out.glob("prompts*")) + list(case.out.glob("answers*"))


@pytest.mark.parametrize(
    ("remove", "message"), [("tokenizer_config.json", "no tokenizer"), ("chat_template.jinja", "no chat template")]
)
def test_a_model_without_tokenizer_or_template(case, capsys, remove, message):
    (case.model / remove).unlink()
    assert case.write(talk("x")).prepare() == 4
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_an_unreadable_source(case, capsys, monkeypatch):
    """Tests may run as root, who reads everything: the refusal is made here."""

    def refuse(path: Path) -> str:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(sources, "file_sha256", refuse)
    assert case.write(talk("x")).prepare() == 4
    assert capsys.readouterr().err == f"prepare: source {case.data} cannot be read (Permission denied)\n"
    assert case.prepare("--prepare.sources", json.dumps(["x" * 5000])) == 4
    assert "too long" in capsys.readouterr().err


def test_no_traceback_in_a_process_of_its_own(case):
    """Also an unknown key in the file; the exit codes are those of pipeline.errors."""
    case.config.write_text(case.config.read_text() + "shuffle = true\n")
    command = [sys.executable, "-m", "pipeline", "prepare", "--config", str(case.config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 2
    assert "prepare.shuffle: no such key" in done.stderr
    assert "Traceback" not in done.stderr


def configured(case: Case, **prepare) -> Run:
    return load(case.config, {"prepare": prepare})


def test_seeds_depend_on_run_and_sample_only():
    seeds = {regenerate.seed_of(run, name) for run in range(3) for name in ("a", "b", "1")}
    assert len(seeds) == 9
    assert all(0 <= seed < 1 << 63 for seed in seeds)
    assert regenerate.seed_of(0, "a") == 5318011831249393047  # another value would change every sampled data set


def test_requests_are_limited_by_the_room_that_is_left(case):
    config = configured(case, max_new_tokens=30)
    prompts = [SpooledPrompt("a", "f", 1, np.arange(n, dtype=np.int32)) for n in (50, 90)]
    requests = [regenerate.request_of(prompt, config) for prompt in prompts]
    assert [r.max_tokens for r in requests] == [30, 10]
    assert len({r.key for r in requests}) == 2


def test_an_answer_is_supervised_with_its_end():
    prompt = SpooledPrompt("a", "f", 1, np.array([1, 2], np.int32))
    sample = regenerate.answered(prompt, [3, END], [END])
    assert sample.input_ids_S.tolist() == [1, 2, 3, END]
    assert sample.loss_mask_S.tolist() == [False, False, True, True]
    for empty in ([], [END]):
        with pytest.raises(Rejected) as caught:
            regenerate.answered(prompt, empty, [END])
        assert caught.value.code == "empty_answer"


def test_the_spool_gives_back_what_it_got(tmp_path):
    prompts = [SpooledPrompt(f"s{i}", "f", i, np.arange(i, dtype=np.int32)) for i in range(2500)]
    assert write_prompts(tmp_path / "p.parquet", iter(prompts)) == 2500
    back = list(read_prompts(tmp_path / "p.parquet"))
    assert [(p.sample_id, p.source, p.row, p.input_ids_S.tolist()) for p in back] == [
        (p.sample_id, p.source, p.row, p.input_ids_S.tolist()) for p in prompts
    ]
    assert write_prompts(tmp_path / "none.parquet", iter([])) == 0
    assert list(read_prompts(tmp_path / "none.parquet")) == []
