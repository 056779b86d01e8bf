"""The part of engine `stream` inside vLLM's worker: a base class that vLLM gives to its worker's class.

A layer's hook sees the rows of a whole step. Whose they are is known when the step has run: the model runner's batch
holds its requests in the order of the rows, the scheduler said how many tokens of each it wanted, and after how many
computed ones they come. That the batch is what we take it for is checked with every row: the token ids that the model
was given are kept with the states, and have to be the sample's.

In a step of vLLM's there may be rows that belong to nobody, after the others (padding), and rows that were computed
before (a request that lost its cache to others begins anew). There are none of the model's own tokens: a request ends
with the first one, before that would be run.
"""

from functools import partial
from typing import Any

import torch
from speculators.data_generation.custom_worker import _argument_names, _decoder
from vllm.distributed import get_tp_group
from vllm.v1.core.sched.output import SchedulerOutput

from pipeline.extract.check import Expected
from pipeline.extract.environment import end_with, ignore_stop_signals
from pipeline.extract.stream.bounds import RING_STEPS
from pipeline.extract.stream.ring import Ring
from pipeline.extract.stream.work import Work
from pipeline.extract.stream.writer import Chunk, Step, Writers


class StreamWorkerExtension:
    """Methods that the driver calls by name. With tensor parallelism all ranks compute equal states: rank 0 keeps them,
    the others return None."""

    def _stream_prepare(
        self, driver_pid: int, layer_ids: list[int], hidden_size: int, dtype: str, max_rows: int
    ) -> None:
        """When the engine starts: leave with the driver, and take the memory between model and writers, which takes a
        second. Raises what allocating memory raises."""
        self._stream_writers: Writers | None = None
        if self.parallel_config.world_size > 1:  # type: ignore[attr-defined]
            # in a process of its own; alone it shares the scheduler's
            end_with(driver_pid)
            ignore_stop_signals(self)
        if get_tp_group().rank_in_group == 0:
            form = Expected(layer_ids, hidden_size, getattr(torch, dtype))
            self._stream_ring = Ring(form, max_rows, RING_STEPS, self.model_runner.device)  # type: ignore[attr-defined]

    def _stream_begin(self, text: str) -> None:
        """Hook the model and start the writers."""
        work = Work.from_text(text)
        if get_tp_group().rank_in_group != 0:
            return
        runner = self.model_runner  # type: ignore[attr-defined]
        self._stream_hooks, self._stream_execute_model = [], runner.execute_model
        self._stream_writers = Writers(work, self._stream_ring)
        decoder: Any = _decoder(runner.model)
        entrances = [(layer, _argument_names(layer)) for layer in decoder.layers]
        entrances.append((decoder.norm, ["hidden_states", "residual"]))
        for place, layer_id in enumerate(work.layer_ids):
            module, names = entrances[layer_id]
            hook = partial(self._stream_keep, place, names)
            self._stream_hooks.append(module.register_forward_pre_hook(hook, with_kwargs=True))
        runner.execute_model = self._stream_execute

    def _stream_report(self) -> str | None:
        """What was written since the last report, and the first error: a Report's text."""
        return self._stream_writers.report().to_text() if self._stream_writers else None

    def _stream_end(self) -> None:
        """Undo `_stream_begin`; a shard that is being written is finished first."""
        if self._stream_writers is None:
            return
        runner = self.model_runner  # type: ignore[attr-defined]
        runner.execute_model = self._stream_execute_model
        for hook in self._stream_hooks:
            hook.remove()
        self._stream_writers.close()
        self._stream_writers = None

    def _stream_keep(self, place: int, names: list[str], _module: torch.nn.Module, args: tuple, kwargs: dict) -> None:
        """Forward pre-hook: what is about to enter a module."""
        if not self._stream_ring.running:  # rows of no request: a warm-up, or a step after an error
            return
        arguments = dict(zip(names, args, strict=False)) | kwargs
        try:
            self._stream_ring.keep(place, arguments["hidden_states"], arguments.get("residual"))
        except Exception as error:  # noqa: BLE001 a dead worker could not tell it
            self._stream_fail(error)

    def _stream_execute(self, scheduler_output: SchedulerOutput, *args: Any, **kwargs: Any) -> Any:
        """Replaces the model runner's execute_model."""
        rows, writers, ring = scheduler_output.total_num_scheduled_tokens, self._stream_writers, self._stream_ring
        assert writers is not None
        if not rows or writers.failed:
            return self._stream_execute_model(scheduler_output, *args, **kwargs)
        ring.begin(rows)
        try:
            output = self._stream_execute_model(scheduler_output, *args, **kwargs)
            if ring.running:
                self._stream_put(scheduler_output)
            return output
        finally:
            ring.drop()

    def _stream_put(self, scheduler_output: SchedulerOutput) -> None:
        """Hand the step that just ran to the writers."""
        runner, writers = self.model_runner, self._stream_writers  # type: ignore[attr-defined]
        assert writers is not None
        try:
            chunks = _chunks(runner.input_batch.req_ids, scheduler_output)
            ids_N = runner.input_ids.cpu[: scheduler_output.total_num_scheduled_tokens].to(torch.int64)
            writers.put(Step(self._stream_ring.end(), ids_N, chunks))
        except Exception as error:  # noqa: BLE001 the same
            self._stream_fail(error)

    def _stream_fail(self, error: Exception) -> None:
        assert self._stream_writers is not None
        self._stream_writers.fail(error)
        self._stream_ring.drop()


def _chunks(req_ids: list[str], scheduler_output: SchedulerOutput) -> list[Chunk]:
    """Whose rows a step computed, in the order of the rows. `req_ids` are the batch's, after the step."""
    cached = scheduler_output.scheduled_cached_reqs
    computed = dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
    computed |= {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
    chunks, row = [], 0
    for req_id in req_ids:
        rows = scheduler_output.num_scheduled_tokens[req_id]
        chunks.append(Chunk(req_id, computed[req_id], row, rows))
        row += rows
    assert row == scheduler_output.total_num_scheduled_tokens, "the batch holds other requests than were scheduled"
    return chunks
