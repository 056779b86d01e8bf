"""What each phase does and measures. Each runs in a process of its own, so that it finds the GPU's memory free.

S tokens of a sample, L captured layers, H hidden size
"""

import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.figures import Measured
from benchmarks.models import Setting, make_prompts, write_run
from pipeline.config import Run
from pipeline.errors import InputError
from pipeline.target import Target

CAPTURE = ("worker_extension_cls", "scheduler_cls")
"""What the engine `stream` adds to vLLM's own way: without these its arguments are those of prefill alone."""
STOCK_THREADS = 8
"""Threads that save samples, one file each."""
BLOCK_BYTES = 1 << 26
"""Random bytes that are written again and again: more than a disk's compression or deduplication looks back."""


def prefill(place: Path, model_folder: Path, setting: Setting) -> Measured:
    """vLLM's ordinary engine, one token a request: no states are looked at, none are kept."""
    from pipeline import engine
    from pipeline.extract.stream.engine import StreamEngine

    config = write_run(place, model_folder, setting)
    started: list[Any] = []
    start = engine.start

    def start_without_capture(*positional: Any, **arguments: Any) -> Any:
        started.append(start(*positional, **{key: value for key, value in arguments.items() if key not in CAPTURE}))
        return started[0]

    # The engine `stream` itself makes its arguments, so that they cannot come apart; this process does nothing after it
    engine.start = start_without_capture
    began = time.monotonic()
    StreamEngine(config, *_target_and_layers(config))
    ready = time.monotonic()
    first_s = _prefill_all(started[0].llm_engine, make_prompts(setting))
    done = time.monotonic()
    started[0].llm_engine.engine_core.shutdown()  # its scheduler is vLLM's own, which knows no other way
    return Measured(
        "prefill", done - ready, setting.prompts * setting.tokens, start_s=ready - began, first_s=first_s - ready
    )


def _prefill_all(llm_engine: Any, prompts: list[list[int]]) -> float:
    """Ask all at once, as LLM.generate does, and run to the last answer. Returns when the first one came."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
    for number, ids in enumerate(prompts):
        llm_engine.add_request(str(number), {"prompt_token_ids": ids}, sampling)
    left, first_s = len(prompts), None
    while left:
        finished = sum(output.finished for output in llm_engine.step())
        left -= finished
        if finished and first_s is None:
            first_s = time.monotonic()
    assert first_s is not None
    return first_s


def stock(place: Path, model_folder: Path, setting: Setting, batch: int) -> Measured:
    """speculators 0.3.0 with only the API breaks mended (see stock.py): `generate` batch by batch, each sample saved by
    a thread as its data_generation script does, without fsync."""
    from pipeline.store import require_space

    require_space(place, setting.states_bytes, "bench", "--tmpfs")
    began = time.monotonic()
    generator = _stock_generator(write_run(place, model_folder, setting), model_folder, setting)
    ready = time.monotonic()
    first_s = _generate_and_save(generator, place, setting, batch)
    done = time.monotonic()
    generator.executor.shutdown()
    files = list(place.glob("data_*.pt"))
    assert len(files) == setting.prompts, "samples are missing"
    return Measured(
        "stock",
        done - ready,
        setting.prompts * setting.tokens,
        size_bytes=sum(file.stat().st_size for file in files),
        files=len(files),
        start_s=ready - began,
        first_s=first_s - ready,
    )


def _stock_generator(config: Run, model_folder: Path, setting: Setting) -> Any:
    from pipeline import engine
    from pipeline.extract.environment import prepare_environment, speculators_silenced

    prepare_environment(config)
    _, layers = _target_and_layers(config)
    with speculators_silenced():
        from speculators.data_generation.vllm_hidden_states_generator import VllmHiddenStatesGenerator

        assert not hasattr(VllmHiddenStatesGenerator, "shutdown"), "this is the patched speculators, not the stock one"
        make: Any = VllmHiddenStatesGenerator
        return make(
            str(model_folder),
            [layer - 1 for layer in layers],  # as released, id i is the *output* of layer i
            setting.tokens + 1,
            config.target.gpu_memory_utilization,
            setting.tensor_parallel,
            dtype=setting.dtype,
            max_num_batched_tokens=setting.batched_tokens,
            load_format="dummy",
            custom_ops=engine.custom_ops(),
        )


def _generate_and_save(generator: Any, place: Path, setting: Setting, batch: int) -> float:
    """Returns when the first states came."""
    import torch

    first_s, saved, prompts = None, [], make_prompts(setting)
    with ThreadPoolExecutor(STOCK_THREADS) as threads:
        for first in range(0, len(prompts), batch):
            results = generator.generate(prompts[first : first + batch])
            first_s = first_s or time.monotonic()
            for number, result in enumerate(results, first):
                _require_rows(result["hidden_states"], setting.tokens)
                data = {
                    "input_ids": result["input_ids"].clone(),
                    "hidden_states": [states_SH.contiguous() for states_SH in result["hidden_states"]],
                    "loss_mask": torch.ones(setting.tokens, dtype=torch.int64),
                }
                saved.append(threads.submit(torch.save, data, place / f"data_{number}.pt"))
        for one in saved:
            one.result()
    assert first_s is not None
    return first_s


def _require_rows(states_LSH: list[Any], tokens: int) -> None:
    """Stock cuts what exceeds max_num_batched_tokens, and says nothing: such a rate would be of less work."""
    if any(len(states_SH) != tokens for states_SH in states_LSH):
        raise InputError(f"bench: stock captured {[len(s) for s in states_LSH]} of {tokens} rows: lower --batch")


def stream(name: str, place: Path, model_folder: Path, setting: Setting) -> Measured:
    """The step `extract` with engine `stream`, as a user runs it: checks, checksums, fsync, records, manifest.

    Timed from the engine being ready to the last shard's record; then every file is read again and compared.
    """
    from pipeline.__main__ import run_step
    from pipeline.store import read_manifest, verify
    from pipeline.store.states import StatesReader

    config = write_run(place, model_folder, setting)
    if code := run_step("extract", config):
        raise InputError(f"bench: {name}: the step extract ended with {code}, its own error is above")
    hidden = config.folder("hidden")
    manifest = read_manifest(hidden, "extract")
    verify(hidden, manifest)
    _require_varied(StatesReader(hidden))
    events = [json.loads(line) for line in (place / "progress.jsonl").read_text().splitlines()]
    ready = next(event for event in events if event["event"] == "ready")
    last = [event for event in events if event["event"] == "shard"][-1]
    size_bytes = sum(file.stat().st_size for file in hidden.glob("shard-*.safetensors"))
    assert size_bytes == manifest.totals["size_bytes"] == last["written_bytes"], "the step counts other bytes"
    assert manifest.totals["tokens"] == setting.prompts * setting.tokens, "tokens are missing"
    return Measured(
        name,
        last["time"] - ready["time"],
        manifest.totals["tokens"],
        size_bytes=size_bytes,
        files=len(manifest.shards),
        start_s=ready["start_s"],
        first_s=events[-1]["first_token_s"],
    )


def _require_varied(reader: Any) -> None:
    """States that are all alike would be quick to write on a disk that compresses."""
    sample = reader.read(0)
    for states_SH in (*sample.aux_states_SLH.unbind(1), sample.last_states_SH):
        if not (states_SH.float().std() > 0 and (states_SH[0] != states_SH[-1]).any()):
            raise InputError("bench: the states of different tokens are alike: this model says nothing about a disk")


def disk(place: Path, setting: Setting, least_bytes: int) -> Measured:
    """What the disk sustains: as many bytes as the states have (at least `least_bytes`), in files of a shard's size, as
    many at once as the step has writers, each synced and renamed as the step does it."""
    from pipeline.store import atomic_path, require_space

    total = max(setting.states_bytes, least_bytes)
    file_bytes = min(total, setting.shard_tokens * setting.bytes_per_token)
    sizes = [min(file_bytes, total - begin) for begin in range(0, total, file_bytes)]
    require_space(place, total, "bench", "--disk")
    block = memoryview(os.urandom(min(BLOCK_BYTES, file_bytes)))

    def write(number: int, size: int) -> None:
        with atomic_path(place / f"file-{number:05d}") as temporary, temporary.open("wb", buffering=0) as file:
            for begin in range(0, size, len(block)):
                file.write(block[: size - begin])

    began = time.monotonic()
    with ThreadPoolExecutor(setting.writers) as threads:
        list(threads.map(write, range(len(sizes)), sizes))
    return Measured("disk", time.monotonic() - began, size_bytes=total, files=len(sizes))


def _target_and_layers(config: Any) -> tuple[Target, list[int]]:
    """The target and the layer ids of the run, in vLLM's serving convention, the number of layers last."""
    target = Target(config.target)
    return target, [*target.aux_layers(config.extract.aux_layers), target.num_layers]


Phase = Callable[[Path, Path, Setting], Measured]


def phases(batch: int, least_bytes: int) -> dict[str, Phase]:
    """All of them, in the order in which they run."""
    return {
        "prefill": prefill,
        "stock": partial(stock, batch=batch),
        "stream-tmpfs": partial(stream, "stream-tmpfs"),
        "stream-disk": partial(stream, "stream-disk"),
        "disk": lambda place, _model_folder, setting: disk(place, setting, least_bytes),
    }
