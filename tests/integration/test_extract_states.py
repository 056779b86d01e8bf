"""States captured by the real engine equal Hugging Face's, layer by layer, whatever is in flight beside them.

One engine a model: Llama, DeepSeek-V3, and Kimi-K2.5, whose text model is a DeepSeek-V3 inside a wrapper. Llama's runs
with the default limits; DeepSeek's is cramped (700 tokens a pass, room for one long prompt in its cache), so that every
long prompt is run in chunks and has to wait for room; Kimi's runs in chunks too.
"""

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from pipeline.config import ExtractSection, PrepareSection, Run, TargetSection, TrainSection
from pipeline.errors import InputError
from pipeline.extract import engines
from pipeline.extract.speculators_engine import SpeculatorsEngine
from pipeline.store.samples import Sample
from pipeline.target import Target
from tests.kimi.model import pinned, save_text_model
from tests.models import Reference, max_relative_error

pytest.importorskip("vllm")

TOLERANCE = 1e-4
MAX_LENGTH = 2304  # all positions that the models know: the engine's place for one more token must not cost one
CRAMPED_CACHE_BYTES = 36_000_000


@pytest.fixture(scope="module", params=["llama", "deepseek", "kimi"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """An engine that captures every layer, its generator, and the reference."""
    folder: Path = request.getfixturevalue(f"{request.param}_folder")
    cramped, kimi = request.param == "deepseek", request.param == "kimi"
    config = Run(
        name="test",
        target=TargetSection(
            **(pinned(folder) if kimi else {"path": str(folder)}), dtype="float32", max_length=MAX_LENGTH
        ),
        prepare=PrepareSection(sources=["unused"]),
        train=TrainSection(tokens_per_row=MAX_LENGTH),
        extract=ExtractSection(
            engine="speculators", max_batched_tokens={"deepseek": 700, "kimi": 300}.get(request.param, 8192)
        ),
    )
    reference = Reference(save_text_model(folder, tmp_path_factory.mktemp("text")) if kimi else folder)
    layer_ids = list(range(reference.num_layers + 1))
    with pytest.MonkeyPatch.context() as patch:
        if cramped:
            from speculators.data_generation import vllm_hidden_states_generator as module

            small = partial(module.VllmHiddenStatesGenerator, kv_cache_memory_bytes=CRAMPED_CACHE_BYTES)
            patch.setattr(module, "VllmHiddenStatesGenerator", small)
        engine = engines.start(config, Target(config.target), layer_ids)
    assert isinstance(engine, SpeculatorsEngine)
    yield SimpleNamespace(
        engine=engine,
        generator=engine._generator,
        reference=reference,
        layer_ids=layer_ids,
        long=500 if kimi else 2000,  # Kimi's reference is slow
    )
    engine.close()


def prompt(bench: SimpleNamespace, seed: int, length: int, stem: list[int] | None = None) -> list[int]:
    """Random ids, after `stem`; drawn again where a choice of experts would hang on rounding."""
    random = np.random.default_rng(seed)
    while not bench.reference.is_decisive(ids := (stem or []) + random.integers(0, 256, length).tolist()):
        pass
    return ids


def check(bench: SimpleNamespace, prompts: list[list[int]]) -> None:
    """Capture `prompts` in one call and compare every layer of each with the reference."""
    results = bench.generator.generate(prompts)
    assert len(results) == len(prompts)
    for number, (ids, result) in enumerate(zip(prompts, results, strict=True)):
        assert result["input_ids"].tolist() == ids, f"prompt {number}"
        states = bench.reference.states(ids)
        for layer, got_SH in zip(bench.layer_ids, result["hidden_states"], strict=True):
            assert got_SH.shape == states[layer].shape, f"prompt {number}, layer {layer}"
            error = max_relative_error(got_SH, states[layer])
            assert error < TOLERANCE, f"prompt {number}, layer {layer}: {error:.1e}"


def test_every_layer_equals_hugging_face(bench: SimpleNamespace):
    """Layer 0 is the embedding's output, the last id what enters the final norm."""
    check(bench, [prompt(bench, n, length) for n, length in enumerate([17, 2, 128, 129, 333])])


def test_ids_shifted_by_one_would_be_seen(bench: SimpleNamespace):
    """0.3.0 captured the output of layer i for id i. Acceptance does not show it on a small model; this does."""
    ids = prompt(bench, 2, 128)
    (result,) = bench.generator.generate([ids])
    states = bench.reference.states(ids)
    for layer, got_SH in enumerate(result["hidden_states"]):
        for other in {layer - 1, layer + 1} & set(bench.layer_ids):
            assert max_relative_error(got_SH, states[other]) > 1000 * TOLERANCE, f"layers {layer} and {other}"


def test_shared_prefixes_and_duplicates_keep_their_rows(bench: SimpleNamespace):
    """With prefix caching, a repeated prompt of 532 tokens came back with 4 rows."""
    stem = prompt(bench, 7, 300)
    long, short = prompt(bench, 8, 200, stem), prompt(bench, 9, 40, stem)
    check(bench, [long, stem, short, long, long, stem[:150], short])
    check(bench, [short, long])


def test_prompts_over_the_token_budget_keep_all_their_rows(bench: SimpleNamespace):
    """0.3.0 left prompt 5 of 5 with 192 of its 2000 rows, silently."""
    check(bench, [prompt(bench, 20 + n, bench.long) for n in range(5)])


def test_more_prompts_than_sequences_in_any_order(bench: SimpleNamespace):
    """40 prompts, 32 sequences; upstream's fix sorted request ids as strings and permuted more than ten."""
    prompts = [prompt(bench, 100 + n, 5 + 11 * n % 60) for n in range(40)]
    check(bench, prompts)
    check(bench, [prompts[n] for n in np.random.default_rng(0).permutation(40)])


def test_longest_and_shortest_prompt(bench: SimpleNamespace):
    check(bench, [prompt(bench, 30, 1), prompt(bench, 31, MAX_LENGTH), prompt(bench, 32, 1)])
    check(bench, [prompt(bench, 33, 1)])


@pytest.mark.parametrize(
    ("bad", "words"),
    [([], "no tokens"), ([1] * (MAX_LENGTH + 1), f"{MAX_LENGTH + 1} tokens"), ([1, 999], "999"), ([-1], "-1")],
    ids=["empty", "too long", "unknown id", "negative id"],
)
def test_a_bad_prompt_is_refused_and_the_next_call_is_right(bench: SimpleNamespace, bad: list[int], words: str):
    """In 0.3.0 an empty prompt's neighbours came out with the next call, a long prompt was cut in silence."""
    good = prompt(bench, 2, 128)
    with pytest.raises(ValueError, match=words):
        bench.generator.generate([good, bad])
    check(bench, [good])


def test_engine_gives_the_samples_back_in_order(bench: SimpleNamespace):
    """Over groups and batches (shards), each with its own ids."""
    samples = [
        Sample(f"s{length}", "c", np.array(prompt(bench, length, length), np.int32), np.ones(length, bool))
        for length in [1, 98, 195, 292, 389, 86, 183, 280, 377]
    ]
    captured = list(bench.engine.capture([samples[:4], [], samples[4:]]))
    assert len(captured) == len(samples)
    for sample, result in zip(samples, captured, strict=True):
        ids = sample.input_ids_S.tolist()
        assert result.input_ids_S.tolist() == ids
        states = bench.reference.states(ids)
        for layer, got_SH in zip(bench.layer_ids, result.states_LSH, strict=True):
            assert max_relative_error(got_SH, states[layer]) < TOLERANCE


def test_a_limit_above_the_models_positions_is_refused(llama_folder: Path, monkeypatch: pytest.MonkeyPatch):
    """The model's very last position is usable (MAX_LENGTH above), the one after it is not."""
    monkeypatch.delenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", raising=False)
    config = Run(
        name="test",
        target=TargetSection(path=str(llama_folder), dtype="float32", max_length=MAX_LENGTH + 1),
        prepare=PrepareSection(sources=["unused"]),
        train=TrainSection(tokens_per_row=MAX_LENGTH + 1),
    )
    with pytest.raises(InputError, match=r"vLLM does not start on .*2304"):
        engines.start(config, Target(config.target), [0, 8])
