"""Engine `speculators`: the patched generator of speculators 0.3.0 on vLLM.

Prompts go in groups of about `max_batched_tokens` tokens, which bounds what travels from the worker to us at once
(Kimi: 57 KB a token) and does not reach over a shard's end.
"""

import logging
import os
import signal
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from pipeline import engine
from pipeline.config import Run
from pipeline.errors import InputError
from pipeline.extract.engines import Captured
from pipeline.store.samples import Sample
from pipeline.target import Target

SPECULATORS_WARNING = 'Field name "torch_dtype"'
"""Begins a warning of pydantic's at every import of speculators 0.3.0, about a model that we do not use."""

ALLOW_LONG = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"


class SpeculatorsEngine:
    """See pipeline.extract.engines.Engine."""

    def __init__(self, config: Run, target: Target, layer_ids: list[int]):
        self._limits = config.extract
        prepare_environment(config)
        try:
            with speculators_silenced(), last_position_usable(config, target):
                from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

                self._generator: Any = VllmHiddenStatesGenerator(
                    str(target.folder),
                    layer_ids,
                    config.target.max_length + 1,  # vLLM keeps a place for the token that ends the request
                    config.target.gpu_memory_utilization,
                    config.target.tensor_parallel_size,
                    trust_remote_code=target.trust_remote_code,
                    dtype=config.target.dtype,
                    load_format=config.target.load_format,
                    max_num_batched_tokens=config.extract.max_batched_tokens,
                    max_num_seqs=config.extract.max_num_seqs,
                    custom_ops=engine.custom_ops(),
                    limit_mm_per_prompt=target.text_only,
                )
        except (ValueError, OSError) as error:
            raise InputError(f"extract: vLLM does not start on {target.folder}: {engine.reason(error)}") from error
        except Exception as error:  # vLLM raises a bare one for a worker that dies while it loads
            if "WorkerProc" not in str(error):
                raise
            raise InputError(
                f"extract: vLLM does not start on {target.folder}: a worker died while loading, its own error is above"
            ) from error
        # Ctrl-C at a terminal reaches all processes, and the workers are to finish the shard in hand. They end with us:
        # vLLM's workers watch a pipe that closes when their parent is gone
        self._generator.executor.collective_rpc(ignore_stop_signals)

    def capture(self, batches: Iterable[list[Sample]]) -> Iterator[Captured]:
        for batch in batches:
            for group in groups(batch, self._limits.max_batched_tokens, self._limits.max_num_seqs):
                results = self._generator.generate([sample.input_ids_S.tolist() for sample in group])
                assert len(results) == len(group), "the generator lost samples"
                for result in results:
                    yield Captured(result["input_ids"], result["hidden_states"])

    def close(self) -> None:
        self._generator.shutdown()


def ignore_stop_signals(_worker: object) -> None:
    """In a worker: leave SIGINT and SIGTERM to the process that has started it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def groups(samples: list[Sample], max_tokens: int, max_samples: int) -> Iterator[list[Sample]]:
    """Consecutive samples of at most so many tokens (or one sample) and so many samples."""
    group: list[Sample] = []
    tokens = 0
    for sample in samples:
        if group and (tokens + len(sample.input_ids_S) > max_tokens or len(group) == max_samples):
            yield group
            group, tokens = [], 0
        group.append(sample)
        tokens += len(sample.input_ids_S)
    if group:
        yield group


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
