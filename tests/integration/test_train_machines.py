"""Training on two machines by torchrun, each with a network of its own: as one process does it, and no hang when one
of them or the folder that they share is missing."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.config import Run, load
from pipeline.errors import InputError
from pipeline.store import read_manifest
from pipeline.train.launch import launch
from tests.machines import CARD, NAMES, Machine, children, kill_all, two_machines
from tests.training import Answers, best_weights, curve, make_answers, prepared_run

PROMPTS, LENGTH, PORT = 16, 40, 29500
TRAIN = {
    "epochs": 4, "learning_rate": 1e-3, "rows_per_step": 2, "tokens_per_row": 128, "validation_share": 0.2,
    "noise": 0.05, "checkpoint_steps": 2, "tracker": "tensorboard", "processes": 1,
}  # fmt: skip
CHECKPOINT = "step-00000002"
START_S, END_S = 200, 60
"""More than a busy machine needs until all are at work; what the end of the others may take: nobody waits a timeout."""
LOST, GOES_ON = "has lost the others (", "train: stopped. Run it again: it goes on"


@dataclass
class Ended:
    """A torchrun that has ended: its exit code (1 for any fault of its processes), what was printed and said."""

    code: int
    out: str
    said: str


@pytest.fixture(scope="module")
def answers(llama_folder: Path) -> Answers:
    return make_answers(llama_folder, PROMPTS, LENGTH)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[tuple[Machine, Machine]]:
    with two_machines(tmp_path) as both:
        yield both


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory, llama_folder, answers) -> tuple[Run, list[Ended], list[int]]:
    """A whole run on two machines: its configuration, what they said, bytes that each received over the wire."""
    folder = tmp_path_factory.mktemp("both")
    path, config = prepared_run(folder, llama_folder, answers, TRAIN)
    with two_machines(folder) as both:
        ended = finish(start(both, path), START_S)
        received = [received_bytes(machine) for machine in both]
    return config, ended, received


def start(machines: tuple[Machine, Machine], path: Path, *flags: str) -> list[subprocess.Popen[str]]:
    """As the README has it; torchrun is this Python's, wherever its script lies."""
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    torchrun += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{NAMES[0]}:{PORT}"]
    command = [*torchrun, "-m", "pipeline", "train", "--config", str(path), *flags]
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": CARD, "NCCL_SOCKET_IFNAME": CARD, "OMP_NUM_THREADS": "1"}
    return [
        subprocess.Popen(machine.command(command), env=environment, stdout=-1, stderr=-1, text=True)
        for machine in machines
    ]


def finish(processes: list[subprocess.Popen[str]], limit_s: float) -> list[Ended]:
    """Wait for both; one that hangs fails the test and says what it had said."""
    deadline, ended = time.monotonic() + limit_s, []
    for process in processes:
        try:
            out, said = process.communicate(timeout=max(1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            left = processes[len(ended) :]
            for one in left:
                kill_all(one.pid)
            said = [one.communicate()[1][-2000:] for one in left]
            pytest.fail(f"still running after {limit_s} s: {'; '.join(said)}")
        ended.append(Ended(process.returncode, out, said))
    return ended


def received_bytes(machine: Machine) -> int:
    import json

    (card,) = json.loads(machine.run("ip", "-json", "-statistics", "link", "show", CARD))
    return card["stats64"]["rx"]["bytes"]


def test_the_machines_have_a_wire_and_nothing_else(machines):
    one, two = machines
    networks = {
        str(Path("/proc/self/ns/net").readlink()),
        *(machine.run("readlink", "/proc/self/ns/net").strip() for machine in machines),
    }
    assert len(networks) == 3, "one of the test and one of each machine"
    for machine in machines:
        (route,) = machine.run("ip", "-4", "route").splitlines()
        assert f"dev {CARD}" in route
        assert route.startswith("192.0.2.0/24")
    listen = (
        "import socket; s = socket.create_server((%r, 7000)); print('listens', flush=True); s.accept()[0].send(b'x')"
    )
    connect = "import socket; print(socket.create_connection((%r, 7000), timeout=5).recv(1))"
    for address, reaches in (("127.0.0.1", False), ("192.0.2.1", True)):
        server = subprocess.Popen(one.command([sys.executable, "-c", listen % address]), stdout=-1, text=True)
        try:
            assert server.stdout
            assert server.stdout.readline() == "listens\n"
            said = subprocess.run(
                two.command([sys.executable, "-c", connect % address]), capture_output=True, text=True
            )
            assert ("b'x'" in said.stdout) == reaches, said.stderr
            assert ("Connection refused" in said.stderr) != reaches, "its own loopback, where nobody listens"
        finally:
            kill_all(server.pid)
            server.communicate()


def test_two_machines_train_as_one_process_does(tmp_path, llama_folder, answers, undisturbed, machines):
    config, (one, two), received = undisturbed
    assert (one.code, two.code) == (0, 0), one.said[-2000:] + two.said[-2000:]
    assert one.said.count("samples to train on") == 1
    assert "train  " not in two.said + two.out, "only rank 0 prints"
    totals = read_manifest(config.folder("checkpoints"), "train").totals
    # each gets the other's part of the gradients, in float32, and the sums of its own: 2 (n-1)/n of all, n = 2
    gradients = totals["steps"] * 4 * totals["parameters"]
    assert all(gradients < size < 1.5 * gradients for size in received), "gradients went another way"

    path, alone = prepared_run(tmp_path, llama_folder, answers, TRAIN)
    subprocess.run([sys.executable, "-m", "pipeline", "train", "--config", str(path)], check=True, capture_output=True)
    assert len(curve(alone, "loss")) == totals["steps"]
    assert curve(alone, "loss")[-1] < 0.95 * curve(alone, "loss")[0]
    np.testing.assert_allclose(curve(config, "loss"), curve(alone, "loss"), rtol=2e-4)
    np.testing.assert_allclose(curve(config, "gradient_norm"), curve(alone, "gradient_norm"), rtol=5e-3)
    for name, tensor in best_weights(alone).items():
        torch.testing.assert_close(best_weights(config)[name], tensor, rtol=1e-2, atol=2e-3)

    again = finish(start(machines, config.runs_dir.parent / "run.toml"), START_S)
    assert [ended.code for ended in again] == [0, 0]
    assert "".join(ended.out for ended in again).count("already done") == 1


@pytest.mark.parametrize(
    ("which", "number", "goes_on"), [(0, signal.SIGKILL, True), (1, signal.SIGKILL, False), (1, signal.SIGTERM, False)],
    ids=["the first is killed", "the second is killed", "the second is told to stop"],
)  # fmt: skip
def test_when_one_machine_ends_the_other_does_and_a_new_start_goes_on(
    tmp_path, llama_folder, answers, undisturbed, machines, which, number, goes_on
):
    path, config = prepared_run(tmp_path, llama_folder, answers, TRAIN)
    processes = start(machines, path, *([] if goes_on else ["--train.epochs", "40"]))  # not done before it is told
    wait_for(config.folder("checkpoints") / CHECKPOINT, processes)
    (torchrun,) = children(processes[which].pid)
    if number == signal.SIGKILL:
        kill_all(torchrun)
    else:
        os.kill(torchrun, number)
    ended = finish(processes, END_S)
    assert not (config.folder("checkpoints") / "manifest.json").exists()
    left = ended[1 - which]
    assert left.code == 1
    if number == signal.SIGKILL:
        assert ended[which].code == -signal.SIGKILL
        assert left.said.count(f"process {2 - which} of 2 on {NAMES[1 - which]} {LOST}") == 1
        assert "[rank" not in left.said, "a traceback of ours"
    else:
        assert [part.said.count(GOES_ON) for part in ended] == [1, 1]

    if not goes_on:
        return  # as above, and it takes as long
    done = finish(start(machines, path), START_S)
    assert [part.code for part in done] == [0, 0], done[0].said[-2000:]
    for name in ("loss", "gradient_norm"):
        assert curve(config, name) == curve(undisturbed[0], name)
    for name, tensor in best_weights(undisturbed[0]).items():
        assert torch.equal(best_weights(config)[name], tensor), name


def task_late_manifest(path: str) -> None:
    from pipeline.train import step

    finish = step.finish

    def late(*arguments):
        time.sleep(2)
        finish(*arguments)

    step.finish = late
    config = load(Path(path), {"train": {"epochs": 1}})
    step.run(config)
    if not (config.folder("checkpoints") / "manifest.json").is_file():
        raise InputError("test: this one has ended before the first one was done")


def test_none_ends_before_the_first_one_has_finished_the_folder(tmp_path, llama_folder, answers):
    """Five minutes after its own processes have ended torchrun does, and takes the place where all met with it."""
    path, _ = prepared_run(tmp_path, llama_folder, answers, TRAIN)
    launch(2, task_late_manifest, str(path))


def wait_for(path: Path, processes: list[subprocess.Popen[str]]) -> None:
    deadline = time.monotonic() + START_S
    while not path.exists():
        assert time.monotonic() < deadline
        assert all(process.poll() is None for process in processes)
        time.sleep(0.02)


@pytest.mark.parametrize("step_folder", ["hidden", "checkpoints"])
def test_a_folder_that_one_machine_does_not_see_is_told(tmp_path, llama_folder, answers, machines, step_folder):
    """A training that went on from a checkpoint on one machine and from the start on the other is worth nothing."""
    path, config = prepared_run(tmp_path, llama_folder, answers, TRAIN)
    folder = config.folder(step_folder)
    if step_folder == "checkpoints":
        (folder / CHECKPOINT).mkdir(parents=True)
    machines[1].run("mount", "-t", "tmpfs", "none", str(folder))
    one, two = finish(start(machines, path), START_S)
    assert (one.code, two.code) == (1, 1)
    assert "[rank" not in one.said + two.said, "a traceback of ours"
    if step_folder == "hidden":
        assert f"{folder} is not finished (no manifest.json). Run the extract step first" in two.said
        assert f"process 1 of 2 on {NAMES[0]} {LOST}" in one.said
    else:
        line = f"train: the newest checkpoint is {CHECKPOINT} on {NAMES[0]} and none on {NAMES[1]}. All machines must"
        assert line in one.said
        assert line in two.said
    assert sorted(path.name for path in config.folder("checkpoints").glob("*")) in ([], [CHECKPOINT])
