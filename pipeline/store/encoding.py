"""States in fewer bytes: the only place that makes stored numbers of states, and states of stored numbers.

`bfloat16` is a plain cast. `fp8` is float8 e4m3fn (four exponent bits, three of mantissa, no infinity) with a float32
scale for each row, which is one layer's state of one token: value = number x scale, scale = (the row's largest
magnitude) / 448, and 448 is the largest number there is. So nothing overflows, and the largest value of a row, which
carries most of it in a language model, is kept to float32's rounding. Numbers are rounded to the nearest, ties to even:

    |value| >= largest / 28,672     error at most |value| / 17        (a normal number: from 2^-6 on, 3 bits)
    below                           error at most largest / 458,752   (a subnormal one: half of 2^-9)

R rows, H hidden size, B rows of a block
"""

import torch

from pipeline.store.dtypes import Stored

FP8 = torch.float8_e4m3fn
LARGEST = 448.0
"""Of e4m3fn's numbers."""
SMALLEST_SCALE = 2.0**-126
"""float32's smallest normal number: the scale of rows of zeros, by which nothing could be divided otherwise."""
BLOCK_VALUES = 1 << 19
"""Values that are worked on at once: 2 MB in float32, which stays in a core's cache (64 times 7,168: twice as fast as
whole shards), and is what is allocated whatever a shard's size."""
MAGNITUDE = 0x7FFFFFFF
"""All bits of a float32 but its sign. As integers magnitudes have the order that they have as numbers."""
F16_FROM_E4M3 = 256.0
"""float16 has e4m3's form with an exponent that begins 8 lower and a longer mantissa."""


def encode_in_place(states: torch.Tensor, stored: Stored) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Numbers of the shape of `states` [..., H], and for fp8 the scales [...], float32.

    `states`, contiguous and finite, are gone afterwards: the result lies in their memory, which it never outgrows, so
    that a shard of 3.8 GB needs no room for another. Equal states give equal bytes on every processor, and torch's
    operations leave Python's lock to other threads.
    """
    dtype = FP8 if stored.scale_bytes else getattr(torch, stored.name)
    assert states.is_contiguous(), "the result could not lie in their memory"
    assert dtype.itemsize <= states.itemsize, "the result would not fit into their memory"
    rows_RH = states.view(-1, states.shape[-1])
    size = rows_RH.numel() * dtype.itemsize
    numbers_RH = states.view(-1).view(torch.uint8)[:size].view(dtype).view(rows_RH.shape)
    scales_R = torch.empty(len(rows_RH)) if stored.scale_bytes else None
    values, magnitudes = _room(rows_RH, torch.float32), _room(rows_RH, torch.int32)
    for block in _blocks(rows_RH):  # forwards: a block's numbers end before the next block's states begin
        values_BH = values[: len(rows_RH[block])].copy_(rows_RH[block])
        if scales_R is not None:
            scales_R[block] = _scales(values_BH, magnitudes[: len(values_BH)])
            values_BH.div_(scales_R[block, None])
        numbers_RH[block].copy_(values_BH)  # to the nearest, ties to even; tests hold it to that
    scales = None if scales_R is None else scales_R.view(states.shape[:-1])
    return numbers_RH.view(states.shape), scales


def decode(
    numbers: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype, out: torch.Tensor | None = None
) -> torch.Tensor:
    """States of `dtype` [..., H] from what `encode_in_place` returned. A half type rounds them once more.

    With `out`, contiguous and of the same shape and `dtype`, they are put there. Every device makes the same of them.
    """
    if scales is None:
        return numbers.to(dtype) if out is None else out.copy_(numbers)
    if numbers.device.type != "cpu":
        return _decode_in_two_passes(numbers, scales, torch.empty_like(numbers, dtype=dtype) if out is None else out)
    bytes_RH, scales_R = numbers.view(torch.int8).view(-1, numbers.shape[-1]), scales.view(-1)
    states_RH = torch.empty(bytes_RH.shape, dtype=dtype) if out is None else out.view(bytes_RH.shape)
    bits, values = _room(bytes_RH, torch.int16), _room(bytes_RH, torch.float32)
    for block in _blocks(bytes_RH):
        # torch's own conversion takes ten times as long. The sign stays where it is, all other bits move down by one
        bits_BH = bits[: len(bytes_RH[block])].copy_(bytes_RH[block])
        bits_BH.bitwise_left_shift_(8).bitwise_right_shift_(1).bitwise_and_(~0x4000)
        values_BH = values[: len(bits_BH)].copy_(bits_BH.view(torch.float16)).mul_(F16_FROM_E4M3)
        states_RH[block].copy_(values_BH.mul_(scales_R[block, None]))
    return states_RH.view(numbers.shape)


def _decode_in_two_passes(numbers: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
    """For a GPU, which converts as fast as it reads. `out` is all the memory: every type of states holds each number
    exactly. A half type is multiplied as float32 and rounded once, as in blocks."""
    return torch.mul(out.copy_(numbers), scales[..., None], out=out)


def _scales(values_BH: torch.Tensor, room_BH: torch.Tensor) -> torch.Tensor:
    torch.bitwise_and(values_BH.view(torch.int32), MAGNITUDE, out=room_BH)
    largest_B = room_BH.amax(dim=-1).view(torch.float32)
    assert largest_B.isfinite().all(), "states are to be checked before they are written"
    return (largest_B / LARGEST).clamp_min_(SMALLEST_SCALE)


def _room(rows_RH: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Memory for a block, used again for each: fresh memory costs more than the work in it."""
    return torch.empty(rows_RH[_blocks(rows_RH)[0]].shape, dtype=dtype)


def _blocks(rows_RH: torch.Tensor) -> list[slice]:
    size = max(1, BLOCK_VALUES // rows_RH.shape[-1])
    return [slice(first, first + size) for first in range(0, len(rows_RH), size)]
