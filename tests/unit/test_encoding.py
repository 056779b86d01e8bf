"""States in fewer bytes: what is lost, what is not, and that it is the same everywhere."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.store import encoding
from pipeline.store.dtypes import is_encoded, stored_dtype
from pipeline.store.encoding import FP8, _decode_in_two_passes, decode, encode_in_place

FP8_STORED = stored_dtype("float32", "fp8")
MAGNITUDES = np.array(
    [m * 2.0**-9 for m in range(8)] + [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)]
)
NUMBERS = MAGNITUDES[:-1]
"""e4m3fn's magnitudes, by its definition; the last pattern is not a number. Position and bits are the same."""
SLACK = 1 + 2.0**-21
"""For what float32 rounds in a scale, a division and a product."""


def coded(states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    numbers, scales = encode_in_place(states.clone(), FP8_STORED)
    assert scales is not None
    return numbers, scales


def nearest(values: np.ndarray) -> np.ndarray:
    """Bits of the number next to each of the values (float64), of two the even one."""
    above = np.searchsorted(NUMBERS, np.abs(values)).clip(1, len(NUMBERS) - 1)
    low, high = np.abs(values) - NUMBERS[above - 1], NUMBERS[above] - np.abs(values)
    bits = np.where((low < high) | ((low == high) & (above % 2 == 1)), above - 1, above)
    return (bits + 128 * np.signbit(values)).astype(np.uint8)


def assert_within_bounds(states_RH: torch.Tensor) -> None:
    """The bounds that encoding.py states, for any row; and every number is the nearest there is."""
    numbers_RH, scales_R = coded(states_RH)
    exact_RH = states_RH.double()
    largest_R1 = exact_RH.abs().amax(-1, keepdim=True)
    scaled_RH = states_RH.float().numpy() / scales_R[:, None].numpy()
    assert np.array_equal(numbers_RH.view(torch.uint8).numpy(), nearest(scaled_RH.astype(np.float64)))
    read_RH = decode(numbers_RH, scales_R, torch.float32)
    error_RH = (read_RH.double() - exact_RH).abs()
    normal_RH = exact_RH.abs() > (largest_R1 / 28_672).clamp_min(2.0**-132) * SLACK
    assert (error_RH <= exact_RH.abs() / 17 * SLACK)[normal_RH].all()
    assert (error_RH <= (largest_R1 / 458_752).clamp_min(2.0**-136) * SLACK)[~normal_RH].all()
    got_RH = decode(numbers_RH, scales_R, states_RH.dtype)
    assert torch.equal(got_RH, read_RH.to(states_RH.dtype))
    assert got_RH.isfinite().all()


FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(st.lists(FLOATS, min_size=5, max_size=5), min_size=1, max_size=4))
@settings(deadline=None)
def test_any_row_of_finite_numbers_keeps_the_bounds(rows: list[list[float]]):
    assert_within_bounds(torch.tensor(rows, dtype=torch.float32))


@given(st.integers(0, 2**32), st.integers(-100, 100), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
@settings(deadline=None, max_examples=40)
def test_states_like_a_language_models_keep_the_bounds(seed: int, exponent: int, dtype: torch.dtype):
    """Most values alike, a few channels a thousand times as large, zeros among the rows."""
    generator = torch.Generator().manual_seed(seed)
    states_RH = torch.randn(7, 100, generator=generator, dtype=torch.float64)
    states_RH[:, [3, 77]] *= 1000
    states_RH[4] = 0
    exponent = exponent // 50 if dtype == torch.float16 else exponent  # whose largest is 65,504
    assert_within_bounds((states_RH * 2.0**exponent).to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_outermost_values(dtype: torch.dtype):
    """The largest that there is, zeros of both signs, and numbers below the smallest normal one."""
    most, tiny = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    rows = [[most, -most, tiny, 0], [0, -0.0, 0, 0], [tiny, -tiny, tiny / 4, 0], [tiny / 8, 0, -tiny / 8, 0]]
    states_RH = torch.tensor(rows, dtype=dtype)
    assert_within_bounds(states_RH)
    numbers_RH, scales_R = coded(states_RH)
    got_RH = decode(numbers_RH, scales_R, dtype)
    assert got_RH[0].tolist() == [most, -most, 0, 0]
    assert got_RH[1].tolist() == [0, 0, 0, 0]


def test_a_rows_largest_value_is_kept():
    """Of half types to the bit; of float32 but for the last one."""
    states_RH = torch.randn(500, 16, generator=torch.Generator().manual_seed(1)) * 300
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        own_RH = states_RH.to(dtype)
        numbers_RH, scales_R = coded(own_RH)
        at_R1 = own_RH.abs().argmax(-1, keepdim=True)
        assert (numbers_RH.float().gather(1, at_R1).abs() == 448).all()
        got_R, want_R = (x.double().gather(1, at_R1) for x in (decode(numbers_RH, scales_R, dtype), own_RH))
        assert ((got_R - want_R).abs() <= want_R.abs() * (2.0**-23 if dtype == torch.float32 else 0)).all()


def test_a_scale_is_a_rows_own():
    """What is beside a row changes nothing: a sample's bytes do not depend on its shard's other samples."""
    states_TLH = torch.randn(40, 3, 33, generator=torch.Generator().manual_seed(2))
    numbers_TLH, scales_TL = coded(states_TLH)
    assert (numbers_TLH.shape, scales_TL.shape) == (states_TLH.shape, states_TLH.shape[:-1])
    assert scales_TL.dtype == torch.float32
    for rows in (slice(0, 1), slice(7, 19)):
        part_SLH, part_SL = coded(states_TLH[rows])
        assert torch.equal(part_SLH.view(torch.uint8), numbers_TLH[rows].view(torch.uint8))
        assert torch.equal(part_SL, scales_TL[rows])


@pytest.mark.parametrize(("dtype", "store_dtype"), [("float32", "fp8"), ("bfloat16", "fp8"), ("float32", "bf16")])
def test_blocks_do_not_show_and_take_no_memory_of_their_own(monkeypatch, dtype: str, store_dtype: str):
    """Where a block's numbers are written the states of later blocks must not be yet."""
    states_TLH = torch.randn(50, 3, 64, generator=torch.Generator().manual_seed(3)).to(getattr(torch, dtype))
    stored = stored_dtype(dtype, store_dtype)
    whole = encode_in_place(states_TLH.clone(), stored)[0].view(torch.uint8)
    for values in (1, 64, 300, 150 * 64 - 1):
        monkeypatch.setattr(encoding, "BLOCK_VALUES", values)
        states = states_TLH.clone()
        numbers, scales = encode_in_place(states, stored)
        assert numbers.data_ptr() == states.data_ptr()
        assert torch.equal(numbers.view(torch.uint8), whole)
        if store_dtype == "bf16":
            assert torch.equal(numbers, states_TLH.bfloat16())
        read = decode(numbers, scales, states_TLH.dtype)
        monkeypatch.setattr(encoding, "BLOCK_VALUES", 1 << 19)
        assert torch.equal(decode(numbers, scales, states_TLH.dtype), read)


@pytest.mark.parametrize("count", [1, 3, 16, 65, 1000])
def test_every_number_is_read_as_what_it_stands_for(count: int):
    """By torch's conversion, which is slow, and by definition; in vectors and in what is left of them."""
    bits = torch.arange(256, dtype=torch.uint8)[[n not in (0x7F, 0xFF) for n in range(256)]]
    numbers = bits.repeat(count).view(FP8).view(1, -1)
    for scale in (1.0, 2.0**-126, 2.0**119):
        got = decode(numbers, torch.full((1,), scale), torch.float32)
        assert torch.equal(got, numbers.float() * scale)
    assert np.array_equal(np.abs(decode(numbers, torch.ones(1), torch.float32)[0, :127].numpy()), NUMBERS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_gpu_reads_the_same(dtype: torch.dtype, device: str):
    """Every number with scales of every size; its way is one that a CPU can go, too."""
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")
    bits = torch.arange(256, dtype=torch.uint8)[[n not in (0x7F, 0xFF) for n in range(256)]]
    generator = torch.Generator().manual_seed(0)
    exponents = torch.arange(-126.0, 7.0 if dtype == torch.float16 else 119.0)
    scales_R = (1 + torch.rand(len(exponents), generator=generator)) * 2**exponents
    numbers_RH = bits.view(FP8).expand(len(scales_R), -1).contiguous()
    want = decode(numbers_RH, scales_R, dtype)
    got = _decode_in_two_passes(numbers_RH.to(device), scales_R.to(device), torch.empty_like(want, device=device))
    assert torch.equal(got.cpu(), want)
    assert want.isfinite().all()


ENCODE = """
import hashlib, numpy, sys, torch
from pipeline.store.encoding import *
from pipeline.store.dtypes import stored_dtype
torch.set_num_threads(int(sys.argv[1]))
values = numpy.random.default_rng(4).standard_normal((300, 3, 513)).astype(numpy.float32)
states = torch.from_numpy(values * values * values)
numbers, scales = encode_in_place(states, stored_dtype("float32", "fp8"))
read = decode(numbers, scales, torch.bfloat16)
print(*(hashlib.sha256(t.view(torch.uint8).numpy()).hexdigest() for t in (numbers, scales, read)))
"""


def test_every_processor_and_any_number_of_threads_give_the_same_bytes():
    said = set()
    for threads, kernels in (("1", "default"), ("2", "avx2"), ("2", "avx512")):
        env = {**os.environ, "ATEN_CPU_CAPABILITY": kernels}
        command = [sys.executable, "-c", ENCODE, threads]
        said.add(subprocess.check_output(command, cwd=Path(__file__).parents[2], env=env, text=True))
    assert len(said) == 1


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_does_not_get_as_far(value: float):
    """It is told with the sample's name before (check.py); here it would be a fault of ours."""
    states = torch.ones(3, 4)
    states[1, 2] = value
    with pytest.raises(AssertionError, match="checked before"):
        coded(states)


def test_what_a_run_keeps_on_the_disk():
    named = {
        (own, key): stored_dtype(own, key).name for own in ("float32", "bfloat16") for key in (None, "bf16", "fp8")
    }
    assert named == {
        ("float32", None): "float32",
        ("float32", "bf16"): "bfloat16",
        ("float32", "fp8"): "fp8",
        ("bfloat16", None): "bfloat16",
        ("bfloat16", "bf16"): "bfloat16",
        ("bfloat16", "fp8"): "fp8",
    }
    assert not is_encoded("bfloat16", "bf16"), "the same files as without it"
    assert is_encoded("float16", "bf16")
    assert 4 * stored_dtype("bfloat16", "fp8").row_bytes(7168) == 28_688
