"""vLLM's scheduler with steps that depend on the samples alone, neither on the clock nor on where a run was resumed.

A model may round a token's states by what it computes beside them. So a step holds rows of one shard only, and no shard
is begun before all its requests have come: each step is then the next `max_batched_tokens` tokens of its shard, and
two runs, or a run and its resumption, give the same bytes. The steps of two shards still follow each other without a
pause.
"""

import multiprocessing
import signal
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from pipeline.extract.environment import end_with
from pipeline.extract.stream.bounds import STEPS_UNDER_WAY
from pipeline.extract.stream.work import END, request_place


class ByShard(Scheduler):
    """Made by vLLM in the process of its engine core, which is the driver's on a CPU."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self._whole: set[int] = set()
        """Shards whose last request has come."""
        if (driver := multiprocessing.parent_process()) is not None:
            leave_signals_to_the_driver()
            end_with(int(driver.pid or 0))

    def add_request(self, request: Request) -> None:
        if not self.requests:  # another order counts its shards anew
            self._whole.clear()
        super().add_request(request)
        place = request_place(request.request_id)
        if place.is_last:
            self._whole.add(place.shard)

    def schedule(self) -> SchedulerOutput:
        later = self._put_aside()
        try:
            return super().schedule()
        finally:
            for request in later:
                self.waiting.add_request(request)

    def _put_aside(self) -> list[Request]:
        """Take the waiting requests that are not for this step out of the queue. Returns them in order.

        The step may begin so many requests that those of the one under way leave room for them: how far that one has
        come is the clock's matter.
        """
        waiting = list(self.waiting)
        begun = [request for request in self.running if request.num_computed_tokens < request.num_prompt_tokens]
        first = next(iter(begun + waiting), None)
        if first is None:
            return []
        shard = request_place(first.request_id).shard
        room = self.max_num_running_reqs // STEPS_UNDER_WAY - len(begun) if shard in self._whole else 0
        now = 0
        while now < min(room, len(waiting)) and request_place(waiting[now].request_id).shard == shard:
            now += 1
        self.waiting.remove_requests(waiting[now:])
        return waiting[now:]


class AsyncByShard(ByShard, AsyncScheduler):
    """The same where vLLM schedules a step while the one before it runs."""


def leave_signals_to_the_driver() -> None:
    """Ctrl-C and a job's SIGTERM reach all its processes, and the shards in hand are to be finished: this process ends
    when the driver sends END, in the way in which vLLM has it end by SIGTERM."""
    signal.signal(END, signal.getsignal(signal.SIGTERM))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
