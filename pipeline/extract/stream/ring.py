"""Takes each step's states off the device while the next step runs.

On a GPU a hook leaves a layer's states in the stage (GPU memory for one step), and a stream of its own copies them
from there into a slot of the ring (pinned host memory). The model's own stream waits before it overwrites a layer's
stage, on the GPU, for a copy that began a whole step ago. On a CPU the hook writes into the slot itself.

N rows of a step, L captured layers, H hidden size
"""

import queue
from dataclasses import dataclass, field
from typing import Any

import torch

from pipeline.extract.check import FAULT, Expected


@dataclass
class Slot:
    """Host memory for one step: `states_LNH`, of which the first `rows` rows are the step's."""

    states_LNH: torch.Tensor
    rows: int = 0
    copied: Any = None
    """CUDA event: the states have arrived. Whoever waits sleeps; others spin."""

    def wait(self) -> None:
        """Wait until the states are here. Other threads run meanwhile."""
        if self.copied is not None:
            self.copied.synchronize()


@dataclass
class Ring:
    """RING_STEPS slots. `begin`, `keep` and `end` are for the thread that runs the model, `release` for the one that
    empties the slots."""

    expected: Expected
    max_rows: int
    slots: int
    device: torch.device
    _free: "queue.SimpleQueue[Slot]" = field(default_factory=queue.SimpleQueue)
    _slot: Slot | None = None
    _seen: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        cuda = self.device.type == "cuda"
        form = self.expected
        shape = (len(form.layer_ids), self.max_rows, form.hidden_size)
        for _ in range(self.slots):
            states_LNH = torch.empty(shape, dtype=form.dtype, pin_memory=cuda)
            self._free.put(Slot(states_LNH, copied=torch.cuda.Event(blocking=True) if cuda else None))
        self._stage_LNH = torch.empty(shape, dtype=form.dtype, device=self.device) if cuda else None
        self._side = torch.cuda.Stream(self.device) if cuda else None
        self._ready = [torch.cuda.Event() for _ in form.layer_ids] if cuda else []
        self._left = [torch.cuda.Event() for _ in form.layer_ids] if cuda else []

    def begin(self, rows: int) -> None:
        """A step of so many rows comes. Waits for a free slot: the model waits, memory does not grow."""
        assert rows <= self.max_rows, "a step of more tokens than max_batched_tokens"
        self._slot = self._free.get()
        self._slot.rows = rows
        self._seen = set()

    def keep(self, place: int, hidden_NH: torch.Tensor, residual_NH: torch.Tensor | None) -> None:
        """Keep what enters the layer at `place` of the wanted ones: the hidden states plus the residual, if it has one.

        Rows after the step's own are padding.
        """
        slot, form = self._slot, self.expected
        assert slot is not None
        layer = form.layer_ids[place]
        if len(hidden_NH) < slot.rows or hidden_NH.shape[1:] != (form.hidden_size,):
            shape, wanted = list(hidden_NH.shape), [slot.rows, form.hidden_size]
            raise RuntimeError(f"extract: states of layer {layer} are {shape}, not {wanted}. {FAULT}")
        if hidden_NH.dtype != form.dtype:
            raise RuntimeError(f"extract: states of layer {layer} are {hidden_NH.dtype}, not {form.dtype}. {FAULT}")
        if self._stage_LNH is None:
            _join(hidden_NH, residual_NH, slot.states_LNH[place, : slot.rows])
        else:
            model, staged_NH = torch.cuda.current_stream(self.device), self._stage_LNH[place, : slot.rows]
            self._left[place].wait(model)
            _join(hidden_NH, residual_NH, staged_NH)
            self._ready[place].record(model)
            assert self._side is not None
            with torch.cuda.stream(self._side):
                self._ready[place].wait(self._side)
                slot.states_LNH[place, : slot.rows].copy_(staged_NH, non_blocking=True)
                self._left[place].record(self._side)
        self._seen.add(place)

    def end(self) -> Slot:
        """The step's slot, once the model has run; its states may still be on their way. Raises RuntimeError unless
        every layer was seen, in which case the slot is free again."""
        slot = self._slot
        assert slot is not None
        self._slot = None
        missing = [layer for place, layer in enumerate(self.expected.layer_ids) if place not in self._seen]
        if missing:
            self.release(slot)
            raise RuntimeError(f"extract: a step ran without states of layers {missing}. {FAULT}")
        if slot.copied is not None:
            slot.copied.record(self._side)
        return slot

    def drop(self) -> None:
        """Give back the slot of a step that failed."""
        if self._slot is not None:
            slot, self._slot = self._slot, None
            self.release(slot)

    @property
    def running(self) -> bool:
        """Whether a step is between `begin` and `end`."""
        return self._slot is not None

    def release(self, slot: Slot) -> None:
        """A slot has been emptied."""
        self._free.put(slot)


def _join(hidden_NH: torch.Tensor, residual_NH: torch.Tensor | None, out_NH: torch.Tensor) -> None:
    rows = len(out_NH)
    if residual_NH is None:
        out_NH.copy_(hidden_NH[:rows])
    else:
        torch.add(hidden_NH[:rows], residual_NH[:rows], out=out_NH)
