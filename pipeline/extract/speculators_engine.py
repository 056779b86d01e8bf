"""Engine `speculators`: the patched generator of speculators 0.3.0 on vLLM.

Prompts go in groups of about `max_batched_tokens` tokens, which bounds what travels from the worker to us at once
(Kimi: 57 KB a token) and does not reach over a shard's end.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from pipeline import engine
from pipeline.config import Run
from pipeline.errors import InputError
from pipeline.extract.engines import Captured
from pipeline.extract.environment import (
    ignore_stop_signals,
    last_position_usable,
    prepare_environment,
    speculators_silenced,
)
from pipeline.store.samples import Sample
from pipeline.target import Target


class SpeculatorsEngine:
    """See pipeline.extract.engines.Engine."""

    def __init__(self, config: Run, target: Target, layer_ids: list[int]):
        self._limits = config.extract
        prepare_environment(config)
        try:
            with speculators_silenced(), last_position_usable(config, target):
                from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

                self._generator: Any = VllmHiddenStatesGenerator(
                    str(target.folder),
                    layer_ids,
                    config.target.max_length + 1,  # vLLM keeps a place for the token that ends the request
                    config.target.gpu_memory_utilization,
                    config.target.tensor_parallel_size,
                    trust_remote_code=target.trust_remote_code,
                    dtype=config.target.dtype,
                    load_format=config.target.load_format,
                    max_num_batched_tokens=config.extract.max_batched_tokens,
                    max_num_seqs=config.extract.max_num_seqs,
                    custom_ops=engine.custom_ops(),
                    limit_mm_per_prompt=target.text_only,
                )
        except (ValueError, OSError) as error:
            raise InputError(f"extract: vLLM does not start on {target.folder}: {engine.reason(error)}") from error
        except Exception as error:  # vLLM raises a bare one for a worker that dies while it loads
            if "WorkerProc" not in str(error):
                raise
            raise InputError(
                f"extract: vLLM does not start on {target.folder}: a worker died while loading, its own error is above"
            ) from error
        # Ctrl-C at a terminal reaches all processes, and the workers are to finish the shard in hand. They end with us:
        # vLLM's workers watch a pipe that closes when their parent is gone
        self._generator.executor.collective_rpc(ignore_stop_signals)

    def capture(self, batches: Iterable[list[Sample]]) -> Iterator[Captured]:
        for batch in batches:
            for group in groups(batch, self._limits.max_batched_tokens, self._limits.max_num_seqs):
                results = self._generator.generate([sample.input_ids_S.tolist() for sample in group])
                assert len(results) == len(group), "the generator lost samples"
                for result in results:
                    yield Captured(result["input_ids"], result["hidden_states"])

    def close(self) -> None:
        self._generator.shutdown()


def groups(samples: list[Sample], max_tokens: int, max_samples: int) -> Iterator[list[Sample]]:
    """Consecutive samples of at most so many tokens (or one sample) and so many samples."""
    group: list[Sample] = []
    tokens = 0
    for sample in samples:
        if group and (tokens + len(sample.input_ids_S) > max_tokens or len(group) == max_samples):
            yield group
            group, tokens = [], 0
        group.append(sample)
        tokens += len(sample.input_ids_S)
    if group:
        yield group
