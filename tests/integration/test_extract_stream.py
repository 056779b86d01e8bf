"""Engine `stream` on the real vLLM: states are those of Hugging Face, whatever is in flight together.

Llama is cramped: 300 tokens a pass, at most 100 of one prompt, and a cache in which long prompts push each other out.
Kimi-K2.5, whose text model lies inside a wrapper, has 300 tokens a pass.
"""

import errno
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pipeline.config import ExtractSection, PrepareSection, Run, TargetSection, TrainSection
from pipeline.errors import InputError
from pipeline.extract import engines
from pipeline.extract.plan import Limits, plan, verified
from pipeline.extract.stream.engine import _Stream
from pipeline.store import Shard, finish
from pipeline.store.samples import Sample
from pipeline.store.states import StatesReader
from pipeline.target import Target
from tests.kimi.model import pinned, save_text_model
from tests.models import Reference, max_relative_error
from tests.runs import contents, make_samples, write_prepared, write_run

pytest.importorskip("vllm")

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-4
MAX_LENGTH = 1024
LAYER_IDS = [1, 2, 5, 8]
CACHE_TOKENS = 1280
"""Llama's: room for the longest prompt, not for two of them."""
RUN_KEY = "0123456789abcdef" * 2


@pytest.fixture(scope="module", params=["llama", "kimi"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    """The engine, started once a model, and the reference."""
    folder: Path = request.getfixturevalue(f"{request.param}_folder")
    kimi = request.param == "kimi"
    config = Run(
        name="test",
        target=TargetSection(
            **(pinned(folder) if kimi else {"path": str(folder)}), dtype="float32", max_length=MAX_LENGTH
        ),
        prepare=PrepareSection(sources=["unused"]),
        train=TrainSection(tokens_per_row=MAX_LENGTH),
        extract=ExtractSection(engine="stream", max_batched_tokens=300, max_num_seqs=8, writers=2),
    )
    reference = Reference(save_text_model(folder, tmp_path_factory.mktemp("text")) if kimi else folder)
    with pytest.MonkeyPatch.context() as patch:
        if not kimi:
            cramp(patch)
        engine = engines.start(config, Target(config.target), LAYER_IDS)
    assert isinstance(engine, engines.WritingEngine)
    yield SimpleNamespace(engine=engine, reference=reference, name=request.param, limits=Limits(256, MAX_LENGTH))
    engine.close()
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

    destroy_model_parallel()  # the next engine of this process is another model's
    destroy_distributed_environment()


def cramp(patch: pytest.MonkeyPatch) -> None:
    """Long prompts side by side, and a cache that they fill."""
    from pipeline import engine

    arguments = engine.engine_arguments
    more = {"long_prefill_token_threshold": 100, "block_size": 16, "num_gpu_blocks_override": CACHE_TOKENS // 16}
    patch.setattr(engine, "engine_arguments", lambda *args, **keys: arguments(*args, **keys) | more)


def core(bench: SimpleNamespace) -> Any:
    """vLLM's engine core, which is in this process."""
    return bench.engine._llm.llm_engine.engine_core.engine_core


def samples_of(bench: SimpleNamespace, lengths: list[int], stem: np.ndarray | None = None) -> list[Sample]:
    """Random ids, after `stem`; drawn again where a choice of experts would hang on rounding."""
    random = np.random.default_rng(len(lengths))
    samples: list[Sample] = []
    for number, length in enumerate(lengths):
        while True:
            ids = random.integers(0, 256, length).astype(np.int32)
            if stem is not None:
                ids = np.concatenate([stem, ids])
            if bench.reference.is_decisive(ids.tolist()):
                break
        samples.append(Sample(f"sample-{number}", f"conversation-{number}", ids, random.random(len(ids)) < 0.5))
    return samples


def order_of(bench: SimpleNamespace, folder: Path, samples: list[Sample], shard_tokens: int) -> engines.Order:
    write_prepared(folder / "prepared", samples)
    (folder / "hidden").mkdir()
    planned = plan(folder / "prepared", shard_tokens, bench.limits)
    return engines.Order(folder / "prepared", folder / "hidden", planned, [shard.file for shard in planned], RUN_KEY)


def rest_of(order: engines.Order, done: Iterable[str]) -> engines.Order:
    return replace(order, files=[file for file in order.files if file not in set(done)])


def made(bench: SimpleNamespace, order: engines.Order) -> dict[str, Shard]:
    """Run the engine to the end; every shard must have its record, and be what it says."""
    went = list(bench.engine.write(order, lambda: False))
    found = verified(order.folder, order.planned, order.run_key)
    assert not found.again
    done = found.done
    assert len(done) == len(order.planned)
    written = {shard.file: shard for step in went for shard in step.written}
    assert written == {file: shard for file, shard in done.items() if file in order.files}
    return done


def check(bench: SimpleNamespace, order: engines.Order, samples: list[Sample]) -> None:
    """Make the shards and compare all that is in them with the samples and with Hugging Face's states."""
    done = made(bench, order)
    shards = [done[shard.file] for shard in order.planned]
    inputs = {"of": "a test"}
    manifest = finish(order.folder, "extract", inputs, shards, {})
    for shard in shards:  # the reader wants the manifest's run key in the headers
        path = order.folder / shard.file
        path.write_bytes(path.read_bytes().replace(RUN_KEY.encode(), manifest.run_key.encode()))
    reader = StatesReader(order.folder)
    assert reader.sample_ids == [sample.sample_id for sample in samples]
    assert reader.conversation_ids == [sample.conversation_id for sample in samples]
    for index, sample in enumerate(samples):
        got = reader.read(index)
        assert got.input_ids_S.tolist() == sample.input_ids_S.tolist()
        assert got.loss_mask_S.tolist() == sample.loss_mask_S.tolist()
        want = bench.reference.states(sample.input_ids_S.tolist())
        for place, layer in enumerate(LAYER_IDS[:-1]):
            assert max_relative_error(got.aux_states_SLH[:, place], want[layer]) < TOLERANCE, (sample.sample_id, layer)
        assert max_relative_error(got.last_states_SH, want[LAYER_IDS[-1]]) < TOLERANCE, sample.sample_id


def test_states_equal_hugging_faces_whatever_is_in_flight_together(bench: SimpleNamespace, tmp_path: Path):
    """One-token samples, more samples than sequences, prompts over the token budget, the longest that there may be."""
    lengths = [1, 700, 1, 17, 450, 128, 129, 333, MAX_LENGTH, 2, 600, 301, *[5 + 11 * n % 60 for n in range(24)], 1]
    samples = samples_of(bench, lengths)
    check(bench, order_of(bench, tmp_path, samples, 800), samples)


def test_shared_prefixes_and_duplicates_keep_their_rows(bench: SimpleNamespace, tmp_path: Path):
    (stem,) = samples_of(bench, [300])
    samples = samples_of(bench, [200, 40, 200, 1], stem.input_ids_S)
    copies = [Sample(f"copy-{n}", "c", s.input_ids_S, s.loss_mask_S) for n, s in enumerate([*samples, stem, *samples])]
    check(bench, order_of(bench, tmp_path, copies, 1300), copies)


def test_one_sample_of_one_token(bench: SimpleNamespace, tmp_path: Path):
    samples = samples_of(bench, [1])
    check(bench, order_of(bench, tmp_path, samples, 800), samples)


def test_a_preempted_request_is_computed_again_and_taken_once(
    bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Its rows come twice."""
    if bench.name != "llama":
        pytest.skip("the cramped engine is Llama's")
    scheduler, preempted = core(bench).scheduler, []
    preempt = scheduler._preempt_request

    def count(request, timestamp):
        preempted.append(request.num_computed_tokens)
        preempt(request, timestamp)

    monkeypatch.setattr(scheduler, "_preempt_request", count)
    samples = samples_of(bench, [700, 650, 900, 500, 720, 3, 800])
    check(bench, order_of(bench, tmp_path, samples, 5000), samples)
    assert any(preempted), "no request that had begun lost its cache: the test shows nothing"


def steps_of(bench: SimpleNamespace, patch: pytest.MonkeyPatch) -> list[dict[str, int]]:
    """Filled while the engine runs: the rows of each request, step by step. Without what vLLM adds to their names."""
    scheduler, steps = core(bench).scheduler, []
    schedule = scheduler.schedule

    def note() -> Any:
        output = schedule()
        if output.num_scheduled_tokens:
            steps.append({name.partition("-")[0]: rows for name, rows in output.num_scheduled_tokens.items()})
        return output

    patch.setattr(scheduler, "schedule", note)
    return steps


def test_a_step_is_the_next_tokens_of_one_shard(
    bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Although 4 x 300 tokens are asked for at once. At most eight samples a step."""
    if bench.name != "kimi":
        pytest.skip("the cramped engine takes parts of long prompts")
    steps = steps_of(bench, monkeypatch)
    made(bench, order_of(bench, tmp_path, make_samples([60, 50, 300, 90, 20, 45, *[10] * 20, 700]), 410))
    assert steps == [
        {"0/0/3": 60, "0/1/3": 50, "0/2/3": 190},
        {"0/2/3": 110},
        {"1/0/23": 90, "1/1/23": 20, "1/2/23": 45, **{f"1/{n}/23": 10 for n in range(3, 8)}},
        {f"1/{n}/23": 10 for n in range(8, 16)},
        {f"1/{n}/23": 10 for n in range(16, 23)},
        {"2/0/1": 300},
        {"2/0/1": 300},
        {"2/0/1": 100},
    ]


def test_a_resumed_order_gives_the_same_bytes(bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Also where experts round by what is in flight together, and however slowly requests come."""
    samples = samples_of(bench, [60, 50, 300, 20, 45, 60, 90, 5, 700, 80])
    order = order_of(bench, tmp_path / "a", samples, 200)
    made(bench, order)
    part = order_of(bench, tmp_path / "b", samples, 200)
    kept = [shard.file for shard in part.planned[1::2]]
    for shard in part.planned[1::2]:
        for name in (shard.file, Path(shard.file).stem + ".json"):
            (part.folder / name).write_bytes((order.folder / name).read_bytes())
    ask = _Stream._ask

    def slowly(self: _Stream, *arguments: Any) -> None:
        ask(self, *arguments)
        core(bench).step_fn()

    monkeypatch.setattr(_Stream, "_ask", slowly)
    made(bench, rest_of(part, kept))
    assert contents(part.folder) == contents(order.folder)


def test_after_a_signal_the_shards_in_hand_are_the_last(bench: SimpleNamespace, tmp_path: Path):
    """The engine holds four at once: those that the model has not begun are taken back."""
    order, seen = order_of(bench, tmp_path, make_samples([300] * 12), 300), []
    assert list(bench.engine.write(order, lambda: True)) == [], "none is begun after it"
    went = bench.engine.write(order, lambda: bool(seen))
    for each in went:
        seen += each.tokens
    assert len(verified(order.folder, order.planned, RUN_KEY).done) == 2
    made(bench, rest_of(order, verified(order.folder, order.planned, RUN_KEY).done))


def test_slow_writers_stop_the_feeding_and_memory_does_not_grow(
    bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Four shards in hand of twelve (two writers, one that four steps fill, one more), however slow the disk."""
    from pipeline.extract.stream import writer

    begun: set[int] = set()
    written: list[int] = []
    in_hand: list[int] = []
    write, opened, lock = writer.write_states, writer.OpenShard, threading.Lock()

    def open_shard(planned, *arguments):
        with lock:
            begun.add(planned.file)
            in_hand.append(len(begun) - len(written))
        return opened(planned, *arguments)

    def slow(path, *arguments, **keywords):
        end = time.monotonic() + 20
        while max(in_hand) < 4 and time.monotonic() < end:  # however slow the engine
            time.sleep(0.02)
        time.sleep(0.1)  # for a fifth
        shard = write(path, *arguments, **keywords)
        with lock:
            written.append(path.name)
        return shard

    monkeypatch.setattr(writer, "OpenShard", open_shard)
    monkeypatch.setattr(writer, "write_states", slow)
    samples = make_samples([100] * 12)
    order = order_of(bench, tmp_path, samples, 100)
    made(bench, order)
    assert max(in_hand) == 4
    assert len(written) == 12


def test_a_full_disk_ends_the_run_and_keeps_what_is_verified(
    bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    from pipeline.extract.stream import writer

    samples = samples_of(bench, [100] * 10)
    undisturbed = order_of(bench, tmp_path / "a", samples, 100)
    made(bench, undisturbed)
    order = order_of(bench, tmp_path / "b", samples, 100)
    write = writer.write_states

    def full(path, *arguments, **keywords):
        if path.name == "shard-00005.safetensors":
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        return write(path, *arguments, **keywords)

    with monkeypatch.context() as patch:
        patch.setattr(writer, "write_states", full)
        with pytest.raises(OSError, match=r"No space left on device: .*shard-00005") as caught:
            list(bench.engine.write(order, lambda: False))
    assert caught.value.errno == errno.ENOSPC
    found = verified(order.folder, order.planned, RUN_KEY)
    assert not found.again
    assert 1 <= len(found.done) < 10
    made(bench, rest_of(order, found.done))
    assert contents(order.folder) == contents(undisturbed.folder)


def test_states_that_are_not_finite_are_refused_with_the_samples_name(bench: SimpleNamespace, tmp_path: Path):
    if bench.name != "llama":
        pytest.skip("one model shows it")
    model = core(bench).model_executor.driver_worker.worker.model_runner.model
    word = model.model.embed_tokens.weight.data[255]
    kept, samples = word.clone(), make_samples([50] * 6, vocab_size=255)
    samples[3].input_ids_S[16] = 255  # the first of a block: the CPU's attention spreads it over its block
    order = order_of(bench, tmp_path, samples, 50)
    word.fill_(float("nan"))
    try:
        with pytest.raises(InputError, match=r"sample sample-3: states of layer 1 are not finite from token 16 on"):
            list(bench.engine.write(order, lambda: False))
    finally:
        word.copy_(kept)
    assert not (order.folder / "shard-00003.safetensors").exists()


@pytest.mark.parametrize("fault", ["order", "gap", "lost", "layer", "hook"])
def test_a_worker_that_mistakes_rows_is_found_out(
    bench: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str
):
    """Requests in another order than their rows; rows from the middle of a sample first; rows that never come; a layer
    that is never called; states of another type. The model goes on: nobody waits for ever."""
    from pipeline.extract.stream import ring, worker
    from pipeline.extract.stream.writer import Chunk

    chunks, keep = worker._chunks, ring.Ring.keep
    if fault == "order":
        words = "sample sample-[0-9]+: the engine answered for other token ids"
        monkeypatch.setattr(worker, "_chunks", lambda ids, output: chunks(ids[::-1], output))
    elif fault == "gap":
        words = "sample sample-[0-9]+: token [0-9]+ came before token 0"
        late = partial(map, lambda c: Chunk(c.request, c.position + 1, c.row, c.rows))
        monkeypatch.setattr(worker, "_chunks", lambda ids, output: list(late(chunks(ids, output))))
    elif fault == "lost":
        words = "sample sample-0: 0 of 40 rows came, and no more are to come"
        monkeypatch.setattr(
            worker, "_chunks", lambda ids, output: [c for c in chunks(ids, output) if not c.request.startswith("0/0")]
        )
    elif fault == "layer":
        words = r"a step ran without states of layers \[5\]"
        monkeypatch.setattr(ring.Ring, "keep", lambda self, place, *a: place == 2 or keep(self, place, *a))
    else:
        words = "states of layer 1 are torch.float64, not torch.float32"
        monkeypatch.setattr(ring.Ring, "keep", lambda self, place, h, r: keep(self, place, h.double(), r))
    order = order_of(bench, tmp_path, make_samples([40, 41, 42, 43, 44, 45]), 90)
    with pytest.raises((InputError, RuntimeError), match=words):
        list(bench.engine.write(order, lambda: False))
    assert not (order.folder / "shard-00000.safetensors").exists()


# ---- The step

LENGTHS = [120, 1, 333, 64, 200, 200, 17, 380, 512, 5, 90, 150]


def test_two_workers_that_share_the_target_write_each_sample_once(llama_folder: Path, tmp_path: Path):
    """Tensor parallel 2: both compute all states, the first one writes them; sums over two halves round otherwise."""
    config, samples = write_run(tmp_path, llama_folder, make_samples(LENGTHS)), make_samples(LENGTHS)
    flags = ["--extract.engine", "stream", "--target.tensor_parallel_size", "2"]
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "extract", "--config", str(config), *flags],
        cwd=ROOT, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1, "the step says one closing line, the engine nothing"
    reader, reference = StatesReader(tmp_path / "runs" / "test" / "hidden"), Reference(llama_folder)
    assert reader.sample_ids == [sample.sample_id for sample in samples]
    for index, sample in enumerate(samples):
        got, want = reader.read(index), reference.states(sample.input_ids_S.tolist())
        assert got.input_ids_S.tolist() == sample.input_ids_S.tolist()
        assert max_relative_error(got.last_states_SH, want[8]) < TOLERANCE
        for place, layer in enumerate([2, 4, 5]):
            assert max_relative_error(got.aux_states_SLH[:, place], want[layer]) < TOLERANCE
