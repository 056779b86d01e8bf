"""States on their way off a GPU: each step's own, though copies are late and the next step is launched over them.

H hidden size, N rows of a step
"""

import pytest
import torch

from pipeline.extract.check import Expected
from pipeline.extract.stream.ring import Ring

HIDDEN, ROWS, LAYERS, STEPS, SLOTS = 256, 64, [1, 2, 3], 300, 3
LATE_CYCLES = 2_000_000
"""Of the GPU's clock, about a millisecond: far longer than a step of this test."""


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU: it is about its streams")
def test_every_slot_holds_its_own_step() -> None:
    device = torch.device("cuda")
    ring = Ring(Expected(LAYERS, HIDDEN, torch.bfloat16), ROWS, SLOTS, device)
    side = ring._side
    assert side is not None
    under_way: list[tuple[int, int, object]] = []

    def check_oldest() -> None:
        step, rows, slot = under_way.pop(0)
        slot.wait()  # type: ignore[attr-defined]
        for place in range(len(LAYERS)):
            got = slot.states_LNH[place, :rows]  # type: ignore[attr-defined]
            assert (got == step % 100 + place).all(), f"step {step}, layer {LAYERS[place]}"
        ring.release(slot)  # type: ignore[arg-type]

    for step in range(STEPS):
        if len(under_way) == SLOTS - 1:
            check_oldest()
        rows = 1 + step % ROWS
        ring.begin(rows)
        if step % 3 == 0:
            with torch.cuda.stream(side):
                torch.cuda._sleep(LATE_CYCLES)
        for place in range(len(LAYERS)):
            states_NH = torch.full((ROWS, HIDDEN), float(step % 100), dtype=torch.bfloat16, device=device)
            residual_NH = torch.full((ROWS, HIDDEN), float(place), dtype=torch.bfloat16, device=device)
            ring.keep(place, states_NH, residual_NH)
            del states_NH, residual_NH  # their memory is the next layer's
        under_way.append((step, rows, ring.end()))
    while under_way:
        check_oldest()
