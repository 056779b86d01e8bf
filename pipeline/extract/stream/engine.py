"""The driver of engine `stream`: feeds samples to vLLM and hears which shards are written. It sees no states.

A request ends with its first token, so each is one pass over a sample's tokens. vLLM cuts the stream of requests into
steps of `max_batched_tokens` as it likes, long samples too; order and identity come from the requests' names.
"""

import os
import time
from collections.abc import Generator, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pipeline import engine
from pipeline.config import Run
from pipeline.errors import InputError
from pipeline.extract.check import FAULT
from pipeline.extract.engines import Order, Went
from pipeline.extract.plan import remaining
from pipeline.extract.speculators_engine import prepare_environment, speculators_silenced
from pipeline.extract.stream.work import Report, Work, host_memory_bytes, request_name, told
from pipeline.preflight.gpus import read_gpus
from pipeline.store import Shard
from pipeline.store.samples import Sample
from pipeline.target import Target

if TYPE_CHECKING:
    from vllm import LLM

FEED = 4
"""Requests that the engine holds, as a multiple of those that run in a step: asynchronous scheduling has two steps
under way, and the next one should not have to wait for us."""
REPORT_S = 1.0
"""Time between two questions to the worker while the model runs: each makes vLLM finish the steps under way."""
WAIT_S = 0.02
"""The same while the model has nothing to do, because shards are being written."""


class StreamEngine:
    """See pipeline.extract.engines.WritingEngine."""

    def __init__(self, config: Run, target: Target, layer_ids: list[int]):
        self._config, self._target, self._layer_ids = config, target, layer_ids
        section = config.extract
        prepare_environment(config, target)
        with speculators_silenced():
            self._llm: LLM | None = engine.start(
                config,
                "extract",
                max_model_len=config.target.max_length + 1,  # vLLM keeps a place for the token that ends the request
                max_num_batched_tokens=section.max_batched_tokens,
                max_num_seqs=section.max_num_seqs,
                enable_chunked_prefill=True,
                enforce_eager=True,  # hooks are not seen by compiled models
                worker_extension_cls="pipeline.extract.stream.worker.StreamWorkerExtension",
                **self._memory(),
            )

    def _memory(self) -> dict[str, Any]:
        """The stage is part of the share of a GPU's memory that the run may take."""
        gpus = [] if engine.on_cpu() else read_gpus().visible
        if not gpus:
            return {}
        section, item = self._config, self._target.dtype.itemsize
        rows = section.extract.max_batched_tokens
        stage_bytes = len(self._layer_ids) * rows * self._target.hidden_size * item
        return {"gpu_memory_utilization": section.target.gpu_memory_utilization - stage_bytes / gpus[0].total_bytes}

    def write(self, order: Order) -> Generator[Went]:
        llm = self._llm
        assert llm is not None, "the engine has ended"
        work = self._work(order)
        _require_memory(work)
        llm.collective_rpc("_stream_begin", args=(work.to_text(),))
        stream = _Stream(llm, work, order, FEED * self._config.extract.max_num_seqs)
        asked = True
        try:
            yield from stream.run()
        except BaseException as error:
            # Ctrl-C reaches vLLM's processes too, and one that has ended does not answer. close() ends the others
            asked = isinstance(error, Exception) or hasattr(llm.llm_engine.engine_core, "engine_core")
            raise
        finally:
            with suppress(Exception):  # a dead engine has ended already, and why is being raised
                if asked:
                    stream.abort()
                    llm.collective_rpc("_stream_end")

    def _work(self, order: Order) -> Work:
        return Work(
            prepared=str(order.prepared),
            folder=str(order.folder),
            planned=order.planned,
            done=order.done,
            run_key=order.run_key,
            layer_ids=self._layer_ids,
            hidden_size=self._target.hidden_size,
            dtype=str(self._target.dtype).removeprefix("torch."),
            max_batched_tokens=self._config.extract.max_batched_tokens,
            writers=self._config.extract.writers,
            driver_pid=os.getpid(),
        )

    def close(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()


class _Stream:
    """One order on its way."""

    def __init__(self, llm: "LLM", work: Work, order: Order, room: int):
        self._llm = llm
        self._room = room
        self._in_hand, self._finished = work.shards_in_hand, 0
        self._left = len([shard for shard in order.planned if shard.file not in set(order.done)])
        self._requests = _requests(order)
        self._next = next(self._requests, None)
        self._held: dict[str, int] = {}
        """Tokens of each request that the engine holds."""
        self._reported = time.monotonic()

    def run(self) -> Iterator[Went]:
        """Until every request has come back and every shard is written. Raises the worker's first error."""
        while self._held or self._left > self._finished:
            self._feed()
            tokens = self._step() if self._held else []
            written: list[Shard] = []
            if not self._held or time.monotonic() - self._reported >= REPORT_S:
                written = self._report()
            if not self._held and not written and self._next_waits():
                time.sleep(WAIT_S)
            if tokens or written:
                yield Went(tokens, written)

    def abort(self) -> None:
        """Take back what the engine holds."""
        if self._held:
            self._llm.llm_engine.abort_request(list(self._held))

    def _next_waits(self) -> bool:
        """Whether there is nothing that may be asked of the model now."""
        return self._next is None or self._next[0] >= self._finished + self._in_hand

    def _feed(self) -> None:
        """Requests for the room that there is, of no shard beyond those that may be in hand."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        running = self._llm.llm_engine
        while len(self._held) < self._room and not self._next_waits():
            assert self._next is not None
            shard, number, sample = self._next
            name = request_name(shard, number)
            prompt: Any = {"prompt_token_ids": sample.input_ids_S.tolist()}
            sampling = SamplingParams(
                max_tokens=1, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
            )
            running.add_request(name, prompt, sampling)
            self._held[name] = len(sample.input_ids_S)
            self._next = next(self._requests, None)

    def _step(self) -> list[int]:
        """Tokens of the samples that have gone through the model."""
        done = [output for output in self._llm.llm_engine.step() if output.finished]
        return [self._held.pop(output.request_id) for output in done]

    def _report(self) -> list[Shard]:
        """Shards that were written since the last report."""
        replies = self._llm.collective_rpc("_stream_report")
        self._reported = time.monotonic()
        written: list[Shard] = []
        for report in [Report.from_text(reply) for reply in replies if reply is not None]:
            if report.error is not None:
                raise told(report.error)
            if report.waits_for and not report.written and not self._held and self._next_waits():
                raise RuntimeError(f"extract: {report.waits_for}, and no more are to come. {FAULT}")
            written += [Shard(**line) for line in report.written]
        self._finished += len(written)
        return written


def _requests(order: Order) -> Iterator[tuple[int, int, Sample]]:
    """Every sample that is left, with the number of its shard among those that are, and its own in the shard."""
    for shard, (_, samples) in enumerate(remaining(order.prepared, order.planned, set(order.done))):
        for number, sample in enumerate(samples):
            yield shard, number, sample


def _require_memory(work: Work) -> None:
    """Raise InputError unless the machine has room for the shards in hand: the kernel would end the worker later."""
    available = host_memory_bytes()
    if work.host_bytes > available:
        raise InputError(
            f"extract: {work.shards_in_hand} shards in memory and the states on their way to them take "
            f"{work.host_bytes / 1e9:.1f} GB, this machine has {available / 1e9:.1f} GB free. "
            "Lower extract.shard_tokens or extract.writers, or use another engine"
        )
