"""What both engines set around vLLM: its environment, its chatter, its signals."""

import logging
import os
import select
import signal
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from pipeline import engine
from pipeline.config import Run
from pipeline.target import Target

SPECULATORS_WARNING = 'Field name "torch_dtype"'
"""Begins a warning of pydantic's at every import of speculators 0.3.0, about a model that we do not use."""

ALLOW_LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


def prepare_environment(config: Run) -> None:
    """What vLLM reads from the environment, set where the user has not; before vLLM is imported."""
    engine.quiet_environment()
    if engine.on_cpu():
        # Without a number vLLM gives a worker one thread, and this process too, for whatever it does afterwards
        cores = len(os.sched_getaffinity(0))
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // config.target.tensor_parallel_size)))


@contextmanager
def last_position_usable(config: Run, target: Target) -> Iterator[None]:
    """Where samples may be as long as the model knows positions: we ask for one place more, which vLLM must allow. It
    is for the sampled token, which is never run.

    Told by the environment, for the workers, and to vLLM's module: an engine that ran in this process before has had
    the environment read once and for all.
    """
    if config.target.max_length != target.config.get("max_position_embeddings"):
        yield
        return
    os.environ.setdefault(ALLOW_LONG, "1")
    from vllm import envs

    setattr(envs, ALLOW_LONG, True)
    try:
        yield
    finally:
        delattr(envs, ALLOW_LONG)


@contextmanager
def speculators_silenced() -> Iterator[None]:
    """Leave out speculators' chatter while the engine starts, here and in the workers."""
    logging.getLogger("speculators").setLevel(logging.WARNING)
    os.environ.setdefault("PYTHONWARNINGS", f"ignore:{SPECULATORS_WARNING}")  # for the workers
    with engine.stdout_silenced(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", SPECULATORS_WARNING)
        yield


def end_with(driver_pid: int) -> None:
    """End this process as soon as the driver has: killed, it could not say so, and its folder is free for another."""
    driver = os.pidfd_open(driver_pid)

    def wait() -> None:
        poll = select.poll()
        poll.register(driver, select.POLLIN)
        poll.poll()
        os._exit(1)

    threading.Thread(target=wait, daemon=True, name="aerie-driver").start()


def ignore_stop_signals(_worker: object) -> None:
    """In a worker: leave SIGINT and SIGTERM to the process that has started it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
