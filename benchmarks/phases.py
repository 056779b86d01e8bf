"""What each phase does and measures. Phases that share an engine take turns in one process; `stock` has its own, so
that it finds the GPU's memory free.

S tokens of a sample, L captured layers, H hidden size
"""

import json
import os
import sys
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from benchmarks.figures import Measured
from benchmarks.models import Setting, make_prompts, write_run
from pipeline.config import Run
from pipeline.errors import InputError, UserError
from pipeline.target import Target

GROUPS = [["prefill", "stream-tmpfs", "stream-disk", "disk"], ["stock"]]
"""Phases that take turns in one process, in their order."""
STOCK_THREADS = 8
"""Threads that save samples, one file each."""
BLOCK_BYTES = 1 << 26
"""Random bytes that are written again and again: more than a disk's compression or deduplication looks back."""

Folder = Callable[[str], AbstractContextManager[str]]
"""A folder for one run of the phase of that name, which is gone afterwards."""


def in_turns(
    names: list[str], rounds: int, folder: Folder, model_folder: Path, setting: Setting, least_bytes: int
) -> Iterator[Measured]:
    """The phases of engine `stream`, of which there is one, and the disk's. A first pass is not measured.

    What a phase fails with is told, and the others go on.
    """
    engine, start_s = _started_stream(folder, model_folder, setting) if names != ["disk"] else (None, 0.0)

    def run(name: str) -> Measured:
        if name == "prefill":
            return _prefill(engine, make_prompts(setting), start_s)
        with folder(name) as place:
            if name == "disk":
                return _fill(Path(place), setting, max(setting.states_bytes, least_bytes))
            return _stream(name, Path(place), model_folder, setting, start_s)

    try:
        for _ in range(rounds):
            for name in names:
                try:
                    yield run(name)
                except (UserError, OSError) as error:
                    print(f"bench  {name}: {error}", file=sys.stderr, flush=True)
    finally:
        if engine:
            engine.close()


def _started_stream(folder: Folder, model_folder: Path, setting: Setting) -> tuple[Any, float]:
    """The engine, warm, for all runs of the step `extract` in this process; and what its start took."""
    from pipeline.extract import engines

    with folder("prefill") as place:
        config = write_run(Path(place), model_folder, setting)
        began = time.monotonic()
        engine: Any = engines.start(config, *_target_and_layers(config))
        start_s = time.monotonic() - began
    engines.start = lambda *_: _Lent(engine)
    _prefill(engine, make_prompts(setting)[: max(1, 2 * setting.batched_tokens // setting.tokens)], start_s)
    return engine, start_s


class _Lent:
    """The engine, for a step that ends its own."""

    def __init__(self, engine: Any):
        self._engine = engine

    def write(self, *arguments: Any) -> Generator[Any]:
        return self._engine.write(*arguments)

    def close(self) -> None:
        pass


def _prefill(engine: Any, prompts: list[list[int]], start_s: float) -> Measured:
    """One token a request: no states are looked at, none are kept, the model is not hooked. To the engine's scheduler
    the prompts are one shard, of which it fills each step, as vLLM's own does."""
    began = time.monotonic()
    first_s = _prefill_all(engine._llm.llm_engine, prompts)
    return Measured(
        "prefill", time.monotonic() - began, sum(map(len, prompts)), start_s=start_s, first_s=first_s - began
    )


def _prefill_all(llm_engine: Any, prompts: list[list[int]]) -> float:
    """Ask all at once, as LLM.generate does, and run to the last answer. Returns when the first one came."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from pipeline.extract.stream.work import Place

    sampling = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)
    for number, ids in enumerate(prompts):
        llm_engine.add_request(Place(0, number, len(prompts)).name(), {"prompt_token_ids": ids}, sampling)
    left, first_s = len(prompts), None
    while left:
        finished = sum(output.finished for output in llm_engine.step())
        left -= finished
        if finished and first_s is None:
            first_s = time.monotonic()
    assert first_s is not None
    return first_s


def stock(rounds: int, folder: Folder, model_folder: Path, setting: Setting, batch: int) -> Iterator[Measured]:
    """speculators 0.3.0 with only the API breaks mended (see stock.py): `generate` batch by batch, each sample saved by
    a thread as its data_generation script does, without fsync."""
    from pipeline.store import require_space

    with folder("stock") as place:
        began = time.monotonic()
        generator = _stock_generator(write_run(Path(place), model_folder, setting), model_folder, setting)
        start_s = time.monotonic() - began
    for _ in range(rounds):
        with folder("stock") as place:
            require_space(Path(place), setting.states_bytes, "bench", "--tmpfs")
            began = time.monotonic()
            first_s = _generate_and_save(generator, Path(place), setting, batch)
            seconds = time.monotonic() - began
            files = list(Path(place).glob("data_*.pt"))
            assert len(files) == setting.prompts, "samples are missing"
            size_bytes = sum(file.stat().st_size for file in files)
            tokens = setting.prompts * setting.tokens
            yield Measured("stock", seconds, tokens, size_bytes, len(files), start_s, first_s - began)
    generator.executor.shutdown()


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


def _stream(name: str, place: Path, model_folder: Path, setting: Setting, start_s: float) -> Measured:
    """The step `extract` with engine `stream`: checks, checksums, fsync, records, manifest.

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
        start_s=start_s,
        first_s=events[-1]["first_token_s"],
    )


def _require_varied(reader: Any) -> None:
    """States that are all alike would be quick to write on a disk that compresses."""
    sample = reader.read(0)
    for states_SH in (*sample.aux_states_SLH.unbind(1), sample.last_states_SH):
        if not (states_SH.float().std() > 0 and (states_SH[0] != states_SH[-1]).any()):
            raise InputError("bench: the states of different tokens are alike: this model says nothing about a disk")


def _fill(place: Path, setting: Setting, total: int) -> Measured:
    """What the disk sustains: so many bytes in files of a shard's size, as many at once as the step has writers, each
    synced and renamed as the step does it."""
    from pipeline.store import atomic_path, require_space

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
