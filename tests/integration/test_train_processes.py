"""Several processes end as one does: the first fault's exit code and its message, once; signals; nobody left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipeline.config import TrainSection
from pipeline.errors import ConfigError, InputError, MismatchError, Stopped
from pipeline.train import launch as module
from pipeline.train.launch import launch, num_processes

ROOT = Path(__file__).parents[2]
FOREVER_S = 600


def rank() -> int:
    return int(os.environ["RANK"])


def meet() -> None:
    """Wait for each other, as every training step does; it fails in the others when one is gone."""
    import torch
    import torch.distributed as dist

    if not dist.is_initialized():
        dist.init_process_group("gloo")
    dist.all_reduce(torch.ones(1))


def task_write(folder: str) -> None:
    import torch.distributed as dist

    meet()
    dist.destroy_process_group()  # as the step does; gloo's threads may abort a process that ends without
    Path(folder, str(rank())).write_text(" ".join(os.environ[key] for key in ("WORLD_SIZE", "LOCAL_RANK")))


def task_user_fault_in_all(_: str) -> None:
    meet()
    raise InputError("test: all say so")


def task_user_fault_in_one(_: str) -> None:
    meet()
    if rank() == 1:
        raise MismatchError("test: one says so")
    while True:
        meet()


def task_full_disk_in_one(_: str) -> None:
    import errno

    meet()
    if rank() == 0:
        raise OSError(errno.ENOSPC, "No space left on device")
    meet()


def task_crash_in_one(_: str) -> None:
    meet()
    if rank() == 1:
        raise RuntimeError("ours")
    while True:
        meet()


def task_killed(_: str) -> None:
    meet()
    if rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    while True:
        meet()


def task_deaf(folder: str) -> None:
    """Neither reads signals nor ends by itself."""
    if rank() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path(folder, "deaf").touch()
        time.sleep(FOREVER_S)
    while not Path(folder, "deaf").exists():
        time.sleep(0.01)
    raise InputError("test: the other one does not hear")


def task_wait(folder: str) -> None:
    Path(folder, f"{rank()}.{os.getpid()}").touch()
    time.sleep(FOREVER_S)


def test_all_do_their_part(tmp_path):
    launch(2, task_write, str(tmp_path))
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"0": "2 0", "1": "2 1"}


@pytest.mark.parametrize(
    ("task", "error", "message"),
    [
        (task_user_fault_in_all, InputError, "test: all say so"),
        (task_user_fault_in_one, MismatchError, "test: one says so"),
        (task_full_disk_in_one, OSError, "No space left"),
    ],
)
def test_a_users_fault_is_raised_as_by_one_process(task, error, message, capfd):
    with pytest.raises(error, match=message):
        launch(2, task, "")
    said = "".join(capfd.readouterr())
    assert message not in said, "it is told by who catches it"
    assert "Traceback" not in said


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (task_crash_in_one, "RuntimeError: ours"),
        (task_killed, "train: process 2 of 2 was ended by SIGKILL (out of memory?)"),
    ],
)
def test_a_crash_is_the_one_that_was_first(task, message, capfd):
    """Not that of a process whose neighbour is gone: "Connection closed by peer" says nothing."""
    with pytest.raises(SystemExit) as ended:
        launch(2, task, "")
    assert ended.value.code == 1
    said = capfd.readouterr().err
    assert said.count(message) == 1
    assert said.count("Traceback") == (task is task_crash_in_one)
    assert "Connection" not in said


def test_the_cause_is_told_from_its_consequences():
    """Two reports may have come before either is read."""
    gone = module._Fault(1.0, "Connection closed by peer")
    crash = module._Fault(2.0, "later crash")
    users = module._Fault(3.0, "", InputError("no consequence of anything"))
    killed = module._Fault(3.0, "was ended by SIGKILL", killed=True)
    assert min([crash, gone], key=module._Fault.precedence) is gone
    assert min([crash, gone, killed], key=module._Fault.precedence) is killed
    assert min([crash, gone, killed, users], key=module._Fault.precedence) is users


def test_who_does_not_hear_is_killed(tmp_path):
    with pytest.raises(InputError, match="does not hear"):
        launch(2, task_deaf, str(tmp_path))


LAUNCH = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell starts its background jobs with SIGINT ignored
from pipeline.__main__ import STEPS, run_step
from pipeline.train import launch
from tests.integration.test_train_processes import task_wait
class Module:
    run = staticmethod(lambda folder: launch.launch(2, task_wait, folder))
if __name__ == "__main__":
    sys.modules["waits"] = Module
    STEPS["waits"] = ("waits",)
    sys.exit(run_step("waits", sys.argv[1]))
"""


@pytest.mark.parametrize("to_all", [False, True], ids=["to the parent", "to all of the terminal"])
@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_a_signal_ends_all_of_them(tmp_path, number, code, to_all):
    script, folder = tmp_path / "script.py", tmp_path / "ranks"
    folder.mkdir()
    script.write_text(LAUNCH)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, script, folder], cwd=ROOT, env=environment, stderr=-1, text=True, start_new_session=True
    )
    try:
        until(lambda: len(list(folder.iterdir())) == 2, 60)
        workers = [int(path.suffix[1:]) for path in folder.iterdir()]
        (os.killpg if to_all else os.kill)(parent.pid, number)
        begun = time.monotonic()
        said = parent.communicate(timeout=30)[1]
        assert time.monotonic() - begun < 5
        assert parent.returncode == code
        assert said.splitlines()[1:] == (["waits: stopped. Run it again: it goes on"] if code > 0 else [])
        until(lambda: not any(is_alive(pid) for pid in workers), 5)
    finally:
        if parent.poll() is None:
            os.killpg(parent.pid, signal.SIGKILL)


def until(condition, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def is_alive(pid: int) -> bool:
    try:
        return "State:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


@pytest.mark.parametrize(
    ("gpus", "rows", "wanted", "count"),
    [(0, 1, None, 1), (0, 1, 3, 3), (8, 16, None, 8), (8, 16, 2, 2), (8, 1, None, 1), (8, 4, None, 4), (8, 1, 2, 2)],
)
def test_the_number_of_processes(monkeypatch, gpus, rows, wanted, count):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: gpus)
    assert num_processes(TrainSection(processes=wanted, rows_per_step=rows)) == count
    monkeypatch.setenv("RANK", "0")
    assert num_processes(TrainSection(processes=wanted, rows_per_step=rows)) == 1, (
        "torchrun's processes start no others"
    )


def test_more_processes_than_gpus_are_refused(monkeypatch):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    with pytest.raises(ConfigError, match=r"train\.processes is 3, and 2 GPUs are visible"):
        num_processes(TrainSection(processes=3))


def test_a_process_group_of_others_outlives_the_step(monkeypatch):
    """An engine of vLLM's that ran in this process has one, and another engine needs it."""
    import torch
    import torch.distributed as dist

    from pipeline.train.step import _processes

    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    made_here = not dist.is_initialized()
    if made_here:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with _processes(torch.get_num_threads()):
            pass
        assert dist.is_initialized()
    finally:
        if made_here and dist.is_initialized():
            dist.destroy_process_group()


# ---- Going on to the bit


def task_go_on(folder: str) -> None:
    """Four steps in one go, and the last two again from where the first two ended; `RANK` says whether all is equal."""
    import copy

    import torch
    import torch.distributed as dist

    from pipeline.train.checkpoint import Progress
    from pipeline.train.loop import Place
    from tests.forecasting import make_trainer, small_run

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    own = Path(folder, f"run-{rank()}")
    own.mkdir()
    sizes = {
        "num_layers": 2,
        "intermediate_size": 8192,
        "tokens_per_row": 128,
        "validation_share": 0,
    }  # several buckets
    config, target = small_run(own, autocast=False, epochs=2, **sizes)
    trainers = []
    for _ in range(2):
        torch.manual_seed(0)  # equal weights in all processes
        trainers.append(make_trainer(config, target, Place(rank(), 3, torch.device("cpu"))))
    saved = []

    def keep(progress: Progress) -> None:
        states = trainers[0].module.state_dict(), trainers[0].optimizer.state_dict()
        saved.append(copy.deepcopy((copy.copy(progress), *states)))

    for trainer in trainers:
        trainer.train_rows = RandomRows(trainer.train_rows)
    trainers[0].run(Progress(), keep, lambda *_: None)
    progress, weights, moments = saved[0]
    assert (progress.step, progress.epoch) == (2, 1)
    trainers[1].module.load_state_dict(weights)
    trainers[1].optimizer.load_state_dict(moments)
    trainers[1].run(progress, lambda _: None, lambda *_: None)
    one, two = (trainer.module.state_dict() for trainer in trainers)
    differing = [name for name in one if not torch.equal(one[name], two[name])]
    Path(folder, str(rank())).write_text(" ".join(differing))
    dist.destroy_process_group()


def task_full_disk_at_a_signal(folder: str) -> None:
    """What a stop has to save does not fit."""
    import errno

    meet()
    got = []
    signal.signal(signal.SIGTERM, lambda number, _frame: got.append(number))
    Path(folder, str(rank())).touch()
    while not got:
        time.sleep(0.05)
    if rank() == 0:
        raise OSError(errno.ENOSPC, "no room for what was to be saved")
    raise Stopped(signal.SIGTERM)


def test_a_fault_after_a_signal_is_told(tmp_path):
    def tell() -> None:
        until(lambda: len(list(tmp_path.iterdir())) == 2, 60)
        os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=tell)
    thread.start()
    with pytest.raises(OSError, match="no room for what was to be saved"):
        launch(2, task_full_disk_at_a_signal, str(tmp_path))
    thread.join()


class RandomRows:
    """Rows of FullRows with random states, others in each step and process."""

    def __init__(self, rows):
        self.rows, self.reader, self.lengths_N = rows, self, [rows.row_tokens] * 12

    def steps_in(self, epoch: int) -> int:
        return self.rows.steps_in(epoch)

    def of_step(self, epoch: int, step: int, rank: int, world: int) -> list[list[int]]:
        return [[(2 * epoch + step) * world + rank]]

    def load(self, row: list[int], room=None):
        import torch

        made = self.rows.load(row, room)
        for states in (made.aux_RLH, made.last_RH):
            states.normal_(generator=torch.Generator().manual_seed(sum(row)))
        return made


def test_three_processes_go_on_to_the_same_bits(tmp_path):
    """Sums of three depend on their order, which DistributedDataParallel changes after its first step."""
    launch(3, task_go_on, str(tmp_path))
    assert [(tmp_path / str(number)).read_text() for number in range(3)] == [""] * 3, "differing"
