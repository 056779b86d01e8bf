"""Kimi-K2.5's released form, experts packed in int4, loads and gives the states that its weights stand for."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.config import ExtractSection, PrepareSection, Run, TargetSection
from pipeline.extract import engines
from pipeline.store.samples import Sample
from pipeline.target import Target
from tests.kimi.int4 import save_int4_kimi
from tests.kimi.model import AUX_LAYERS, NUM_LAYERS, pinned, save_text_model
from tests.models import Reference

pytest.importorskip("vllm")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: int4 experts are for CUDA")


def test_states_of_int4_weights(kimi_folder: Path, tmp_path: Path):
    """At the first layer within bfloat16's rounding. Later ones have more rows that went to other experts, which score
    alike: there the states are at least nearer by half than to what the weights were before they were quantised."""
    int4, meant = tmp_path / "int4", tmp_path / "meant"
    save_int4_kimi(kimi_folder, int4, meant)
    target = TargetSection(**pinned(int4), dtype="bfloat16", gpu_memory_utilization=0.3)
    config = Run(
        name="test",
        target=target,
        prepare=PrepareSection(sources=["unused"]),
        extract=ExtractSection(engine="speculators"),
    )
    random = np.random.default_rng(0)
    samples = [
        Sample(f"s{n}", "c", random.integers(0, 512, length).astype(np.int32), np.ones(length, bool))
        for n, length in enumerate([300, 17, 1, 120])
    ]
    engine = engines.start(config, Target(target), [*AUX_LAYERS, NUM_LAYERS])
    try:
        captured = list(engine.capture([samples]))
    finally:
        engine.close()
    reference = Reference(save_text_model(meant, tmp_path / "text"))
    unquantised = Reference(save_text_model(kimi_folder, tmp_path / "unquantised"))
    for slot, layer in enumerate([*AUX_LAYERS, NUM_LAYERS]):
        got_SH = torch.cat([result.states_LSH[slot].float() for result in captured])
        error_S = _errors(got_SH, reference, samples, layer)
        other_S = _errors(got_SH, unquantised, samples, layer)
        print(f"layer {layer}: median error {error_S.median():.3f}, of unquantised weights {other_S.median():.3f}")
        assert float(error_S.median()) < float(other_S.median()) / 2
        assert layer > AUX_LAYERS[0] or float(error_S.median()) < 0.05


def _errors(got_SH: torch.Tensor, reference: Reference, samples: list[Sample], layer: int) -> torch.Tensor:
    """Each row's largest difference, as a share of the row's largest value."""
    want_SH = torch.cat([reference.states(sample.input_ids_S.tolist())[layer] for sample in samples])
    return (got_SH - want_SH).abs().amax(-1) / want_SH.abs().amax(-1)
