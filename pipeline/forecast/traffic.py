"""What the gradients' way between the GPUs takes in a training step: computed, not measured.

DistributedDataParallel sums up float32 gradients over all processes once a step, with the last row of each. NCCL's ring
sends 2 (n-1)/n of their bytes through each GPU's link, in either direction. That, by time, is what nccl-tests calls
bus bandwidth (its doc/PERFORMANCE.md); a broadcast's is its own rate. Sums of losses and counts are left out: some
hundred bytes.
"""

from dataclasses import dataclass

GRADIENT_BYTES = WEIGHT_BYTES = 4
"""Both are float32 whatever autocast says."""


@dataclass(frozen=True)
class AllReduce:
    """Of one step. `hidden_s` is what computing can hide at most of `seconds`."""

    gradient_bytes: int
    link_bytes: float
    seconds: float
    hidden_s: float


def all_reduce(trainable: int, output_rows: int, processes: int, gb_per_s: float) -> AllReduce:
    """The all-reduce of `trainable` weights at a bus bandwidth, in 10**9 bytes a second.

    Hidden can be that of the draft's `output_rows` (how many weights), which are finished before the backward pass
    begins. All others are finished in step 0, the last of the backward pass, and on a GPU by one compiled graph
    (pipeline.train.loss.compile_step): when they can be sent, there is nothing left to compute.
    """
    gradient_bytes = GRADIENT_BYTES * trainable
    link_bytes = 2 * (processes - 1) / processes * gradient_bytes
    seconds = link_bytes / (gb_per_s * 1e9)
    return AllReduce(gradient_bytes, link_bytes, seconds, seconds * output_rows / max(1, trainable))


def broadcast_s(weights: int, gb_per_s: float) -> float:
    """Seconds of a step in which replicas send each other the float32 weights that one has stepped for all (Muon's)."""
    return WEIGHT_BYTES * weights / (gb_per_s * 1e9)
