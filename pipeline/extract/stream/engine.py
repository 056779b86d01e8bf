"""The driver of engine `stream`: feeds samples to vLLM and hears which shards are written. It sees no states.

A request ends with its first token, so each is one pass over a sample's tokens. vLLM cuts a shard's requests into steps
of `max_batched_tokens`, through long samples too; order and identity come from the requests' names.
"""

import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pipeline import engine
from pipeline.config import Run
from pipeline.extract.check import FAULT
from pipeline.extract.engines import Order, Went
from pipeline.extract.environment import last_position_usable, prepare_environment, speculators_silenced
from pipeline.extract.plan import remaining
from pipeline.extract.stream import bounds
from pipeline.extract.stream.work import END, Place, Report, Work, request_place, told
from pipeline.preflight.gpus import read_gpus
from pipeline.store import Shard
from pipeline.store.samples import Sample
from pipeline.target import Target

if TYPE_CHECKING:
    from vllm import LLM

REPORT_S = 1.0
"""Time between two questions to the worker while the model runs: each is answered between two steps."""
BLOCKED_S = 0.1
"""The same while there is room for requests, and no more shards may be in hand until some are written."""
WAIT_S = 0.005
"""The same while the model has nothing to do, because shards are being written."""


class StreamEngine:
    """See pipeline.extract.engines.WritingEngine."""

    def __init__(self, config: Run, target: Target, layer_ids: list[int]):
        self._config, self._target, self._layer_ids = config, target, layer_ids
        section = config.extract
        prepare_environment(config)
        before = multiprocessing.active_children()
        with speculators_silenced(), last_position_usable(config, target):
            self._llm: LLM | None = engine.start(
                config,
                "extract",
                max_model_len=config.target.max_length + 1,  # vLLM keeps a place for the token that ends the request
                max_num_batched_tokens=section.max_batched_tokens,
                max_num_seqs=min(bounds.STEPS_UNDER_WAY * section.max_num_seqs, section.max_batched_tokens),
                enable_chunked_prefill=True,
                enforce_eager=True,  # hooks are not seen by compiled models
                worker_extension_cls="pipeline.extract.stream.worker.StreamWorkerExtension",
                **self._scheduling(),
                **self._memory(),
            )
        started = [process for process in multiprocessing.active_children() if process not in before]
        self._engine_processes = [process for process in started if process.name.startswith("EngineCore")]
        try:
            rows = section.max_batched_tokens
            self._llm.collective_rpc(
                "_stream_prepare", args=(os.getpid(), layer_ids, target.hidden_size, self._dtype, rows)
            )
            _tell_if_cramped(config, self._llm)
        except BaseException:
            self.close()
            raise

    def _scheduling(self) -> dict[str, Any]:
        """On a GPU vLLM schedules a step while the one before it runs; its CPU build does not."""
        scheduler = "pipeline.extract.stream.scheduler."
        if engine.on_cpu():
            return {"scheduler_cls": f"{scheduler}ByShard"}
        return {"scheduler_cls": f"{scheduler}AsyncByShard", "async_scheduling": True}

    def _memory(self) -> dict[str, Any]:
        """The stage is part of the share of a GPU's memory that the run may take."""
        gpus = [] if engine.on_cpu() else read_gpus().visible
        if not gpus:
            return {}
        stage_bytes = bounds.stage_bytes(self._config.extract, self._token_bytes)
        share = self._config.target.gpu_memory_utilization - stage_bytes / gpus[0].total_bytes
        return {"gpu_memory_utilization": share}

    @property
    def _token_bytes(self) -> int:
        return len(self._layer_ids) * self._target.hidden_size * self._target.dtype.itemsize

    @property
    def _dtype(self) -> str:
        return str(self._target.dtype).removeprefix("torch.")

    def write(self, order: Order, stopping: Callable[[], bool]) -> Generator[Went]:
        llm = self._llm
        assert llm is not None, "the engine has ended"
        work = self._work(order)
        llm.collective_rpc("_stream_begin", args=(work.to_text(),))
        stream = _Stream(llm, work, order, stopping)
        try:
            yield from stream.run()
        finally:
            with suppress(Exception):  # a dead engine has ended already, and why is being raised
                stream.abort()
                llm.collective_rpc("_stream_end")

    def _work(self, order: Order) -> Work:
        return Work(
            prepared=str(order.prepared),
            folder=str(order.folder),
            planned=order.planned,
            files=order.files,
            run_key=order.run_key,
            layer_ids=self._layer_ids,
            hidden_size=self._target.hidden_size,
            dtype=self._dtype,
            max_batched_tokens=self._config.extract.max_batched_tokens,
            writers=self._config.extract.writers,
            shards_in_hand=bounds.shards_in_hand(self._config.extract),
            store_dtype=self._config.extract.store_dtype,
        )

    def close(self) -> None:
        llm, self._llm = self._llm, None
        if llm is not None:
            for process in self._engine_processes:
                if process.is_alive():
                    os.kill(int(process.pid or 0), END)
            llm.llm_engine.engine_core.shutdown()


class _Stream:
    """One order on its way."""

    def __init__(self, llm: "LLM", work: Work, order: Order, stopping: Callable[[], bool]):
        self._llm, self._stopping = llm, stopping
        self._room = bounds.FEED * work.max_batched_tokens
        self._in_hand, self._begun, self._finished = work.shards_in_hand, 0, 0
        self._shards = remaining(order.prepared, order.planned, set(order.files))
        self._next = next(self._shards, None)
        self._held: dict[str, int] = {}
        """Tokens of each request that the engine holds."""
        self._reported = time.monotonic()
        self._stopped = False

    def run(self) -> Iterator[Went]:
        """Until every shard that was begun is written. Raises the worker's first error."""
        while self._goes_on():
            tokens = self._step() if self._held else []
            written = self._report() if self._report_is_due() else []
            if not self._held and not written:
                time.sleep(WAIT_S)
            if tokens or written:
                yield Went(tokens, written)

    def _goes_on(self) -> bool:
        if self._stopping() and not self._stopped:
            self._wind_down()
        return self._feed() or self._begun > self._finished

    def _report_is_due(self) -> bool:
        if not self._held:
            return True
        since = time.monotonic() - self._reported
        return since >= (BLOCKED_S if self._next and sum(self._held.values()) < self._room else REPORT_S)

    def abort(self) -> None:
        """Take back what the engine holds."""
        self._take_back(list(self._held))

    def _take_back(self, names: list[str]) -> None:
        if names:
            self._llm.llm_engine.abort_request(names)
            for name in names:
                del self._held[name]

    def _wind_down(self) -> None:
        """Leave it at the shards that the model has done, and the one that it is at."""
        self._stopped, self._next = True, None
        if self._held:
            at_work = min(request_place(name).shard for name in self._held)
            self._take_back([name for name in self._held if request_place(name).shard > at_work])
            self._begun = at_work + 1

    def _feed(self) -> bool:
        """Whole shards for the room that there is, none beyond those that may be in hand. Whether there was one."""
        fed = False
        while self._next and self._begun < self._finished + self._in_hand and sum(self._held.values()) < self._room:
            _, samples = self._next
            for number, sample in enumerate(samples):
                self._ask(Place(self._begun, number, len(samples)).name(), sample)
            self._begun += 1
            self._next, fed = next(self._shards, None), True
        return fed

    def _ask(self, name: str, sample: Sample) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        prompt: Any = {"prompt_token_ids": sample.input_ids_S.tolist()}
        sampling = SamplingParams(
            max_tokens=1, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        self._llm.llm_engine.add_request(name, prompt, sampling)
        self._held[name] = len(sample.input_ids_S)

    def _step(self) -> list[int]:
        """Tokens of the samples that have gone through the model."""
        done = [output for output in self._llm.llm_engine.step() if output.finished]
        return [self._held.pop(output.request_id) for output in done if output.request_id in self._held]

    def _report(self) -> list[Shard]:
        """Shards that were written since the last report."""
        replies = self._llm.collective_rpc("_stream_report")
        self._reported = time.monotonic()
        written: list[Shard] = []
        for report in [Report.from_text(reply) for reply in replies if reply is not None]:
            if report.error is not None:
                raise told(report.error)
            if report.waits_for and not report.written and not self._held and not self._stopped:
                raise RuntimeError(f"extract: {report.waits_for}, and no more are to come. {FAULT}")
            written += [Shard(**line) for line in report.written]
        self._finished += len(written)
        return written


def _tell_if_cramped(config: Run, llm: "LLM") -> None:
    """See bounds.cache_tokens."""
    cache = llm.llm_engine.vllm_config.cache_config
    have, want = (cache.num_gpu_blocks or 0) * cache.block_size, bounds.cache_tokens(config, cache.block_size)
    if have < want:
        print(
            f"extract  memory holds keys and values of {have:,} tokens, {want:,} would be needed to make the same "
            "bytes in every run: last bits may differ. Lower extract.max_batched_tokens or extract.max_num_seqs",
            file=sys.stderr,
        )
