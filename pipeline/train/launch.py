"""The processes of `train` on this machine: starts one a GPU, and ends as one process would.

torchrun starts them as well, but its exit code is always 1 and its own report hides ours. Here the first fault of any
process is the command's: told once, with its exit code. The processes find each other as torchrun's do, through a
store that the parent keeps. None outlives the parent, however that ends.
"""

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing import connection, resource_tracker
from types import FrameType
from typing import Any

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]  (documented)
from tqdm import tqdm

from pipeline.config import Run, TrainSection
from pipeline.errors import NO_ROOM, ConfigError, Stopped, UserError
from pipeline.stop import EXIT_S, notice, say

HOST = "127.0.0.1"
NOTICE = notice("train", "the step in hand is done and saved", EXIT_S)
GRACE_S = EXIT_S + 1
"""After a signal: processes that have not saved and ended by then are killed. Checkpoints are whole either way."""
POLL_S = 0.2
"""The longest time from a signal to what is done about it."""
TOLD_TO_END = (-signal.SIGTERM, -signal.SIGKILL, 128 + signal.SIGTERM, 128 + signal.SIGINT)
"""Exit codes of a process that was told to end."""
PR_SET_PDEATHSIG = 1
"""prctl(2): the signal that the kernel sends to a process when its parent ends."""


def run(config: Run) -> None:
    """Train in as many processes as the configuration says; see `pipeline.train.step.run` for what it raises."""
    count = num_processes(config.train)
    if count == 1:
        _run_here(config)
    else:
        launch(count, _train, config.model_dump_json())


def _run_here(config: Run) -> None:
    """In this process, which may be one of torchrun's: there nobody else says what the loss of another one is."""
    from pipeline.train import machines, step

    try:
        step.run(config)
    except RuntimeError as error:
        if line := machines.told(error, int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))):
            raise line from error
        raise


def num_processes(section: TrainSection) -> int:
    """How many to start; 1 where this is one of several already. Raises ConfigError for more than there are GPUs."""
    if "RANK" in os.environ:
        return 1
    gpus = torch.cuda.device_count()
    if section.processes and 0 < gpus < section.processes:
        raise ConfigError(f"train: train.processes is {section.processes}, and {gpus} GPUs are visible")
    return section.processes or max(1, min(gpus, section.rows_per_step))


def launch(count: int, task: Callable[[str], None], argument: str) -> None:
    """Run `task(argument)` in `count` processes and wait for them. The first that fails, or a signal, stops all.

    Raises what the first one to fail raised where that is a user's fault or a full disk; a crash is printed with its
    traceback and ends this process with exit code 1. SIGINT and SIGTERM raise Stopped when all have ended by
    themselves without a fault, or were killed: after a second signal at once, else after GRACE_S.
    """
    store = TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
    with _Signals() as signals:
        workers: list[_Worker] = []
        try:
            # blocked while they start, SIGINT stays so in them: Ctrl-C reaches all of a terminal, this process acts.
            # multiprocessing's own helper, once started, unblocks it: start that first
            resource_tracker.ensure_running()
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            workers += (_Worker(rank, count, store.port, task, argument) for rank in range(count))
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
            _wait(workers, signals)
            ended = not signals.received or _let_end(workers, signals)
        finally:
            _stop(workers)
    faults = [worker.fault for worker in workers if worker.fault]
    if signals.received and (not ended or (not faults and any(worker.process.exitcode for worker in workers))):
        raise Stopped(signals.received)
    if faults:
        first = min(faults, key=_Fault.precedence)
        if first.error:
            raise first.error
        print(first.text, file=sys.stderr)
        sys.exit(1)


@dataclass(frozen=True)
class _Fault:
    """How a process failed: `error` where it is one that is told in a line, else `text`."""

    time_s: float
    text: str
    error: Exception | None = None
    killed: bool = False

    def precedence(self) -> tuple[bool, bool, float]:
        """The least is the cause. Others crash because one is gone: a user's fault, a kill are no consequences."""
        return self.error is None, not self.killed, self.time_s


class _Worker:
    """One process, and what is known about its end."""

    def __init__(self, rank: int, count: int, port: int, task: Callable[[str], None], argument: str):
        context = multiprocessing.get_context("spawn")
        self.rank, self.count = rank, count
        self.fault: _Fault | None = None
        self.stopped = False
        self.reports, send = context.Pipe(duplex=False)
        environment = {
            "RANK": rank,
            "WORLD_SIZE": count,
            "LOCAL_RANK": rank,
            "LOCAL_WORLD_SIZE": count,
            "MASTER_ADDR": HOST,
            "MASTER_PORT": port,
            "TORCHELASTIC_USE_AGENT_STORE": True,  # the store is the parent's
            "TORCHELASTIC_RESTART_COUNT": 0,
        }
        arguments = ({name: str(value) for name, value in environment.items()}, os.getpid(), send, task, argument)
        self.process = context.Process(target=_work, args=arguments, name=f"train-{rank}")
        self.process.start()
        send.close()

    @property
    def waits_for(self) -> list[Any]:
        """What is ready when there is something to look at."""
        return [self.process.sentinel] if self.reports.closed else [self.process.sentinel, self.reports]

    def look(self) -> None:
        """Take a report that has come, or note that the process ended without one."""
        if not self.reports.closed and self.reports.poll():
            try:
                self.fault = self.reports.recv()
            except EOFError:
                self.reports.close()
        if self.fault is None and (code := self.process.exitcode) and not (self.stopped and code in TOLD_TO_END):
            how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
            killed = code == -signal.SIGKILL
            text = f"train: process {self.rank + 1} of {self.count} {how}{' (out of memory?)' if killed else ''}"
            self.fault = _Fault(time.monotonic(), text, killed=killed)


class _Signals:
    """Within the block, SIGINT and SIGTERM are noted in `received` instead of acted upon; ignored ones stay ignored."""

    def __init__(self):
        self.received: int = 0
        self.again = False

    def __enter__(self) -> "_Signals":
        old = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        self._old = {number: handler for number, handler in old.items() if handler is not signal.SIG_IGN}
        for number in self._old:
            signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.again = bool(self.received)
        self.received = self.received or number


def _wait(workers: list[_Worker], signals: _Signals) -> None:
    """Until all have ended, or one has failed, or there is a signal."""
    running = workers
    while running and not signals.received:
        connection.wait([thing for worker in running for thing in worker.waits_for], timeout=POLL_S)
        if signals.received:
            return  # which ended some of them as well, where it went to all of a terminal: no fault of theirs
        for worker in running:
            worker.look()
        if any(worker.fault for worker in running):
            return
        running = [worker for worker in running if worker.process.exitcode is None]


def _let_end(workers: list[_Worker], signals: _Signals) -> bool:
    """Tell all to end, and wait until they have, or a second signal comes, or the time is over. Whether they have."""
    say(NOTICE)
    for worker in workers:
        worker.stopped = True
        worker.process.terminate()
    deadline = time.monotonic() + GRACE_S
    while not signals.again and time.monotonic() < deadline:
        if not (running := [worker for worker in workers if worker.process.exitcode is None]):
            return True
        connection.wait([worker.process.sentinel for worker in running], timeout=POLL_S)
    return False


def _stop(workers: list[_Worker]) -> None:
    """End what still runs; take the reports of those that failed meanwhile, which may have been the first.

    Killed, not told: one that waits for another in a collective operation hears nothing.
    """
    for worker in workers:
        worker.look()
        worker.stopped = True
        worker.process.kill()
    for worker in workers:
        worker.process.join()
        worker.look()


def _work(
    environment: dict[str, str],
    parent: int,
    report: connection.Connection,
    task: Callable[[str], None],
    argument: str,
) -> None:
    """What a process does: the task; at a fault, the report of it and no more (a group with a gap may never close)."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)
    os.environ.update(environment)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all are on this machine; its name need not resolve
    # tqdm's usual lock is shared between processes: one that is ended leaves it, and Python warns of it
    tqdm.set_lock(threading.RLock())
    try:
        task(argument)
    except Stopped as stopped:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(stopped.exit_code)  # the parent says so
    except Exception as error:  # noqa: BLE001 (the parent raises or prints it)
        full = isinstance(error, OSError) and error.errno in NO_ROOM
        told = error if isinstance(error, UserError) or full else None
        report.send(_Fault(time.monotonic(), traceback.format_exc(), told))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def _train(config: str) -> None:
    from pipeline.train import step

    step.run(Run.model_validate_json(config))
