"""The scheduler of engine `stream` alone, as on a GPU: steps under way together, requests that come when they like."""

import random
from collections import deque
from pathlib import Path
from unittest.mock import Mock

import pytest

from pipeline.config import ExtractSection, PrepareSection, Run, TargetSection, TrainSection
from pipeline.extract.stream import bounds
from pipeline.extract.stream.work import Place, request_place

pytest.importorskip("vllm")

MAX_TOKENS, MAX_SEQS, MAX_LENGTH = 300, 8, 1024
SHARDS = [[60, 50, 300], [90, 20, 45, *[10] * 20], [700], [1], [299, 2, 299], [5] * 40, [3, 1024, 290, 1024], [40, 299]]
RUN = Run(
    name="r", target=TargetSection(path="/x", max_length=MAX_LENGTH), prepare=PrepareSection(sources=["x"]),
    extract=ExtractSection(max_batched_tokens=MAX_TOKENS, max_num_seqs=MAX_SEQS),
    train=TrainSection(tokens_per_row=MAX_LENGTH),
)  # fmt: skip
CACHE_BLOCKS = 1 + -(-bounds.cache_tokens(RUN) // bounds.BLOCK_TOKENS)
"""What is said to be enough, and the one that vLLM keeps for itself."""


def scheduler_on(model: Path, kind: str):
    """`kind` of a two-layer cache of CACHE_BLOCKS blocks, without an engine."""
    import torch
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from pipeline.extract.stream import scheduler

    config = EngineArgs(
        model=str(model), dtype="float32", max_model_len=MAX_LENGTH + 1, max_num_batched_tokens=MAX_TOKENS,
        max_num_seqs=2 * MAX_SEQS, enable_prefix_caching=False, enable_chunked_prefill=True, skip_tokenizer_init=True,
    ).create_engine_config()  # fmt: skip
    config.scheduler_config.async_scheduling = kind == "AsyncByShard"
    config.cache_config.num_gpu_blocks = CACHE_BLOCKS
    spec = FullAttentionSpec(block_size=bounds.BLOCK_TOKENS, num_kv_heads=1, head_size=64, dtype=torch.float32)
    cache = KVCacheConfig(CACHE_BLOCKS, [], [KVCacheGroupSpec(["layer"], spec)])
    manager = Mock(spec=StructuredOutputManager, should_advance=lambda request: False)
    return getattr(scheduler, kind)(config, cache, manager, block_size=bounds.BLOCK_TOKENS)


def requests() -> deque:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    return deque(
        Request(
            Place(shard, n, len(lengths)).name() + "-12345678", [1] * length, SamplingParams(max_tokens=1), None, None
        )
        for shard, lengths in enumerate(SHARDS)
        for n, length in enumerate(lengths)
    )


def steps_of(scheduler, most_under_way: int, chance: random.Random) -> list[dict[str, int]]:
    """Run the requests of SHARDS through; when they come and when a step's end is heard of is chance's matter."""
    from vllm.v1.outputs import ModelRunnerOutput

    to_come, under_way, steps = requests(), deque(), []
    while to_come or under_way or scheduler.has_unfinished_requests():
        act = chance.choice(["come", "schedule", "end"])
        if act == "come" and to_come:
            for _ in range(min(len(to_come), chance.randrange(1, 30))):
                scheduler.add_request(to_come.popleft())
        elif act == "schedule" and len(under_way) < most_under_way and scheduler.has_requests():
            step = scheduler.schedule()
            if step.num_scheduled_tokens:
                steps.append(dict(step.num_scheduled_tokens))
                ends = [scheduler.requests[name].num_computed_tokens for name in step.num_scheduled_tokens]
                under_way.append((step, ends))
        elif act == "end" and under_way:
            step, ends = under_way.popleft()
            names = list(step.num_scheduled_tokens)
            sampled = [
                [7] if end >= scheduler.requests[name].num_prompt_tokens else []
                for name, end in zip(names, ends, strict=True)
            ]
            index = {name: n for n, name in enumerate(names)}
            scheduler.update_from_output(step, ModelRunnerOutput(names, index, sampled))
    return steps


@pytest.mark.parametrize(("kind", "under_way"), [("ByShard", 1), ("AsyncByShard", 2)])
def test_steps_depend_neither_on_when_requests_come_nor_on_when_steps_end(
    llama_folder: Path, kind: str, under_way: int
):
    want = steps_of(scheduler_on(llama_folder, kind), 1, random.Random(0))
    assert sum(map(sum, SHARDS)) == sum(sum(step.values()) for step in want)
    for step in want:
        assert len({request_place(name).shard for name in step}) == 1, "one shard a step"
        assert sum(step.values()) <= MAX_TOKENS
        assert len(step) <= MAX_SEQS
    assert [len(step) for step in want if request_place(next(iter(step))).shard == 5] == [8] * 5
    for seed in range(1, 30):
        assert steps_of(scheduler_on(llama_folder, kind), under_way, random.Random(seed)) == want, seed


def test_vllms_own_scheduler_would_have_it_otherwise(llama_folder: Path, monkeypatch: pytest.MonkeyPatch):
    """Else the test above would show nothing."""
    from pipeline.extract.stream.scheduler import ByShard

    monkeypatch.setattr(ByShard, "_put_aside", lambda self: [])
    runs = [steps_of(scheduler_on(llama_folder, "AsyncByShard"), 2, random.Random(seed)) for seed in range(8)]
    assert any(run != runs[0] for run in runs)
