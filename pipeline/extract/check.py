"""What is asked of every captured sample before its shard may be written."""

from dataclasses import dataclass

import torch

from pipeline.errors import InputError
from pipeline.extract.engines import Captured
from pipeline.store.samples import Sample

FAULT = "This is a fault of the engine or of its patches: please report it"


@dataclass(frozen=True)
class Expected:
    """The form of a sample's states: one tensor [S, hidden_size] of `dtype` for each of `layer_ids`."""

    layer_ids: list[int]
    hidden_size: int
    dtype: torch.dtype


def check_captured(sample: Sample, captured: Captured, expected: Expected) -> None:
    """Raise InputError, naming the sample, unless `captured` is all of it and nothing else, and finite."""
    name = f"extract: sample {sample.sample_id}"
    if captured.input_ids_S.tolist() != sample.input_ids_S.tolist():
        raise InputError(f"{name}: the engine answered for other token ids. {FAULT}")
    layers = len(expected.layer_ids)
    if len(captured.states_LSH) != layers:
        raise InputError(f"{name}: states of {len(captured.states_LSH)} layers, not {layers}. {FAULT}")
    shape = (len(sample.input_ids_S), expected.hidden_size)
    for layer, states_SH in zip(expected.layer_ids, captured.states_LSH, strict=True):
        if tuple(states_SH.shape) != shape:
            raise InputError(f"{name}: states of layer {layer} are {list(states_SH.shape)}, not {list(shape)}. {FAULT}")
        if states_SH.dtype != expected.dtype:
            raise InputError(f"{name}: states of layer {layer} are {states_SH.dtype}, not {expected.dtype}. {FAULT}")
        low, high = states_SH.aminmax()  # ten times the speed of isfinite on every number
        if not (low.isfinite() and high.isfinite()):
            finite_S = torch.isfinite(states_SH).all(dim=-1)
            token = int((~finite_S).nonzero()[0])
            raise InputError(
                f"{name}: states of layer {layer} are not finite from token {token} on. "
                "Try target.dtype float32 or bfloat16, or drop the sample from the sources"
            )
