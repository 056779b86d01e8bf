"""Attempts at a step on the real engine, each in a process of its own that is ready in a second instead of thirty.

A zygote is a process that has imported everything, and has started nothing: no engine, no thread of OpenMP's, so that
it can be forked. Each attempt is a fork of it that calls the command line's `main`. The engine is vLLM's own, from its
start on; only the way in which vLLM makes a process of its own, for the engine `speculators`, is changed from spawn to
fork.

    with Zygote(folder) as zygote:
        attempt = zygote.begin(["extract", "--config", str(config)])
        attempt.wait_until_ready()
        attempt.end(after_s=0.2)   # kill -9; -9
"""

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
LIMIT_S = 120.0
"""No attempt at a tiny run takes so long, on a busy machine either."""
ORPHANED_S = 20.0
"""Until the processes of a killed attempt must have ended."""
CACHE_BLOCKS = 40
"""Of 128 tokens: for the tiny runs of the tests. Filling vLLM's smallest cache, 1 GB, with zeros takes a second."""
IMPORTED = [
    "pandas",
    "pipeline.extract.merge",
    "pipeline.extract.stream.engine",
    "pipeline.extract.stream.scheduler",
    "pipeline.extract.stream.worker",
    "speculators.data_generation.vllm_hidden_states_generator",
    "tests.extraction",
    "vllm.entrypoints.openai.cli_args",
    "vllm.model_executor.model_loader",
    "vllm.model_executor.models.llama",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.engine.core",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.worker.cpu_worker",
]
"""What an attempt would import otherwise."""

Act = tuple[str, ...]
"""What is changed in the process of an attempt: `module:function` and its arguments."""


@dataclass
class Attempt:
    """A process at work."""

    zygote: "Zygote"
    pid: int
    log: Path
    ready: Path

    def wait_until_ready(self) -> bool:
        """Wait until the engine has started. False: the process ended before."""
        descriptor = os.pidfd_open(self.pid)
        try:
            while not self.ready.exists():
                if select.select([descriptor], [], [], 0.002)[0]:
                    return self.ready.exists()
            return True
        finally:
            os.close(descriptor)

    def end(self, after_s: float | None = None) -> int:
        """Wait until the process has ended, or so long, then kill it; and until all that it started have ended.

        Returns its exit code, or the negative number of the signal that ended it.
        """
        descriptor = os.pidfd_open(self.pid)
        try:
            if not select.select([descriptor], [], [], LIMIT_S if after_s is None else after_s)[0]:
                os.kill(self.pid, signal.SIGKILL)
                assert after_s is not None, f"an attempt does not end:\n{self.said}"
        finally:
            os.close(descriptor)
        answer = self.zygote.ask({"wait": self.pid})
        assert not answer["orphans"], f"processes outlive the one that has started them:\n{self.said}"
        return answer["code"]

    @property
    def said(self) -> str:
        """stdout and stderr."""
        return self.log.read_text()


class Zygote:
    """The process, for those who start attempts. `folder` is for what the attempts say."""

    def __init__(self, folder: Path):
        self._folder, self._lock, self._count = folder, threading.Lock(), 0

    def __enter__(self) -> "Zygote":
        self._folder.mkdir(parents=True, exist_ok=True)
        one_thread = {"OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1", "PYTHONPATH": str(ROOT)}
        with (self._folder / "zygote.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.zygote"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                cwd=ROOT, env={**os.environ, **one_thread},
            )  # fmt: skip
        self.ask({"wait": None})
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()  # its attempts go with it
        self._process.communicate()

    def begin(
        self, arguments: Sequence[str], act: Act | None = None, environment: dict[str, str] | None = None
    ) -> Attempt:
        """Start the command line with `arguments` in a process of its own, changed by `act`."""
        with self._lock:
            self._count += 1
            name = str(self._folder / f"attempt-{self._count}")
        log, ready = Path(f"{name}.log"), Path(f"{name}.ready")
        asked = {"arguments": list(arguments), "act": act, "environment": environment or {}}
        return Attempt(self, self.ask(asked | {"log": str(log), "ready": str(ready)})["pid"], log, ready)

    def run(self, *arguments: str, act: Act | None = None) -> tuple[int, str]:
        """The exit code of the command line, and what it said."""
        attempt = self.begin(arguments, act)
        return attempt.end(), attempt.said

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """A line to the process, and its answer."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        with self._lock:
            stdin.write(json.dumps(request).encode() + b"\n")
            stdin.flush()
            answer = stdout.readline()
        assert answer, f"the zygote has ended:\n{(self._folder / 'zygote.log').read_text()}"
        return json.loads(answer)


# ---- In the zygote


def serve() -> None:
    """Answer the lines on stdin, until there are no more."""
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    _import_all()
    for line in sys.stdin.buffer:
        request = json.loads(line)
        answer = _reaped(request["wait"]) if "wait" in request else {"pid": _fork(request, answers)}
        os.write(answers, json.dumps(answer).encode() + b"\n")


def _import_all() -> None:
    """Import what attempts need; nothing may be started by it."""
    from pipeline import engine

    engine.quiet_environment()
    for name in IMPORTED:
        importlib.import_module(name)
    import torch

    assert not torch.cuda.is_initialized()
    _small_cache()
    _fork_workers()
    _die_with_the_parent()
    gc.collect()
    gc.freeze()  # vLLM collects garbage three times while it starts: all that was imported is none


def _small_cache() -> None:
    from pipeline import engine

    arguments = engine.engine_arguments
    engine.engine_arguments = lambda *a, **k: {"num_gpu_blocks_override": CACHE_BLOCKS, **arguments(*a, **k)}


def _fork_workers() -> None:
    """vLLM's CPU build insists on spawn, for which a worker imports all that is here already."""
    import multiprocessing

    from vllm.v1.executor import multiproc_executor

    work = multiproc_executor.WorkerProc.worker_main

    def work_until_told(*arguments: Any, death_pipe: Any, **keywords: Any) -> None:
        _close_writer(death_pipe.fileno())
        work(*arguments, death_pipe=death_pipe, **keywords)

    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")  # type: ignore[assignment]
    multiproc_executor.WorkerProc.worker_main = staticmethod(work_until_told)  # type: ignore[assignment]


def _close_writer(reader: int) -> None:
    """In a forked worker: it has both ends of the pipe whose end tells it to end, and would wait for itself."""
    pipe = (Path("/proc/self/fd") / str(reader)).readlink()
    for path in list(Path("/proc/self/fd").iterdir()):
        if path.name != str(reader) and path.is_symlink() and path.readlink() == pipe:
            os.close(int(path.name))


PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""linux/prctl.h"""


def _die_with_the_parent() -> None:
    """An attempt dies with the zygote, a worker with its attempt; what is left comes to the zygote, which waits."""
    prctl = ctypes.CDLL(None).prctl
    assert prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    os.register_at_fork(after_in_child=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0))


def _fork(request: dict[str, Any], answers: int) -> int:
    child = os.fork()
    if child:
        os.setpgid(child, child)
        return child
    code = 70
    try:
        os.setpgid(0, 0)
        os.close(answers)
        _redirect(request["log"])
        code = _attempt(request)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:  # noqa: BLE001 it has nowhere else to go
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _redirect(log: str) -> None:
    for descriptor, path, flags in [(0, os.devnull, os.O_RDONLY), (1, log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)]:
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.dup2(1, 2)


def _attempt(request: dict[str, Any]) -> int:
    os.environ.update(request["environment"])
    from pipeline.__main__ import main
    from pipeline.extract import engines

    start = engines.start

    def start_and_tell(*arguments: Any) -> Any:
        started = start(*arguments)
        Path(request["ready"]).touch()
        return started

    engines.start = start_and_tell
    if request["act"]:
        function, *values = request["act"]
        module, _, name = function.partition(":")
        getattr(importlib.import_module(module), name)(*values)
    return main(request["arguments"])


def _reaped(child: int | None) -> dict[str, Any]:
    """Wait for an attempt, and for what it has left, which is all of its process group: vLLM's processes end by
    themselves when the one that has started them is gone. Its exit code, and whether there are `orphans` still."""
    if child is None:
        return {}
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    deadline = time.monotonic() + ORPHANED_S
    while time.monotonic() < deadline:
        try:
            if os.waitpid(-child, os.WNOHANG) == (0, 0):
                time.sleep(0.005)
        except ChildProcessError:
            return {"code": code, "orphans": False}
    os.killpg(child, signal.SIGKILL)
    return {"code": code, "orphans": True}


if __name__ == "__main__":
    serve()
