"""Engine `stream` without vLLM: rows in their places, a step's states, what driver and worker tell each other."""

import errno
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from pipeline.config import ExtractSection, PrepareSection, Run, TargetSection
from pipeline.errors import InputError
from pipeline.extract.check import Expected
from pipeline.extract.plan import Planned
from pipeline.extract.stream import bounds
from pipeline.extract.stream.engine import _Stream
from pipeline.extract.stream.ring import Ring, Slot
from pipeline.extract.stream.work import END, Place, Report, Work, request_place, tell, told
from pipeline.extract.stream.writer import Chunk, OpenShard, Step, Writers
from pipeline.store.samples import Sample
from tests.runs import make_samples, write_prepared

HIDDEN, LAYERS = 4, 3
LENGTHS = [3, 1, 6]


def open_shard() -> OpenShard:
    samples = [
        Sample(f"s{n}", "c", np.arange(length, dtype=np.int32), np.ones(length, bool))
        for n, length in enumerate(LENGTHS)
    ]
    memory = (torch.full((20, LAYERS - 1, HIDDEN), -1.0), torch.full((20, HIDDEN), -1.0))
    return OpenShard(Planned("shard-00000.safetensors", 3, 10, 10, 20), samples, memory)


def states(number: int, position: int, layer: int) -> float:
    return 1000.0 * number + 10.0 * position + layer


def take(shard: OpenShard, *chunks: tuple[int, int, int]) -> None:
    """One step of (sample, position, rows), its rows one after the other, padding behind."""
    step_rows = sum(rows for _, _, rows in chunks)
    states_LNH = torch.full((LAYERS, step_rows + 5, HIDDEN), float("nan"))
    ids_N, row, parts = torch.zeros(step_rows, dtype=torch.int64), 0, []
    for number, position, rows in chunks:
        for offset in range(rows):
            ids_N[row + offset] = position + offset
            for layer in range(LAYERS):
                states_LNH[layer, row + offset] = states(number, position + offset, layer)
        parts.append((number, Chunk(Place(0, number, len(LENGTHS)).name(), position, row, rows)))
        row += rows
    for number, chunk in parts:
        shard.take(number, chunk, Step(Slot(states_LNH, step_rows), ids_N, []))


def assert_right(shard: OpenShard) -> None:
    assert shard.is_full
    for number, (sample, rows) in enumerate(shard.rows_of()):
        assert shard.ids_T[rows].tolist() == sample.input_ids_S.tolist()
        for position in range(len(sample.input_ids_S)):
            row = rows.start + position
            want = [states(number, position, layer) for layer in range(LAYERS)]
            assert [*shard.aux_TLH[row, :, 0].tolist(), float(shard.last_TH[row, 0])] == want
    assert (shard.memory[0][10:] == -1).all(), "rows behind the shard were written"


def test_chunks_of_samples_in_any_order_are_put_in_their_places():
    shard = open_shard()
    take(shard, (2, 0, 2), (1, 0, 1))
    assert not shard.is_full
    take(shard, (0, 0, 3), (2, 2, 1))
    take(shard, (2, 3, 3))
    assert_right(shard)


def test_rows_that_come_again_are_taken_once():
    """After a preemption; in other chunks than before; and a row of the model's own token behind a prompt."""
    shard = open_shard()
    take(shard, (2, 0, 4), (0, 0, 3))
    take(shard, (2, 0, 3), (0, 0, 3))
    take(shard, (2, 3, 3), (1, 0, 2))
    assert_right(shard)
    take(shard, (1, 1, 1))
    assert_right(shard)


def test_a_gap_is_an_error():
    shard = open_shard()
    take(shard, (2, 0, 2))
    with pytest.raises(RuntimeError, match="sample s2: token 3 came before token 2"):
        take(shard, (2, 3, 1))


@pytest.fixture
def ring() -> Ring:
    return Ring(Expected([1, 2, 8], HIDDEN, torch.float32), max_rows=8, slots=2, device=torch.device("cpu"))


def test_a_step_keeps_the_sum_of_states_and_residual_without_padding(ring: Ring):
    hidden_NH, residual_NH = torch.randn(8, HIDDEN), torch.randn(8, HIDDEN)
    ring.begin(5)
    ring.keep(0, hidden_NH, None)
    ring.keep(1, hidden_NH, residual_NH)
    ring.keep(2, residual_NH, hidden_NH)
    slot = ring.end()
    slot.wait()
    assert torch.equal(slot.states_LNH[0, :5], hidden_NH[:5])
    assert torch.equal(slot.states_LNH[1, :5], hidden_NH[:5] + residual_NH[:5])
    assert torch.equal(slot.states_LNH[2, :5], hidden_NH[:5] + residual_NH[:5])


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (torch.zeros(8, HIDDEN, dtype=torch.bfloat16), "layer 2 are torch.bfloat16, not torch.float32"),
        (torch.zeros(4, HIDDEN), r"layer 2 are \[4, 4\], not \[5, 4\]"),
        (torch.zeros(5, HIDDEN + 1), r"layer 2 are \[5, 5\], not \[5, 4\]"),
    ],
    ids=["dtype", "rows", "width"],
)
def test_states_of_another_form_are_refused(ring: Ring, state: torch.Tensor, words: str):
    ring.begin(5)
    with pytest.raises(RuntimeError, match=words):
        ring.keep(1, state, None)


def test_a_step_that_missed_a_layer_is_refused_and_gives_its_slot_back(ring: Ring):
    for _ in range(3):  # more often than there are slots
        ring.begin(5)
        ring.keep(0, torch.zeros(5, HIDDEN), None)
        with pytest.raises(RuntimeError, match=r"without states of layers \[2, 8\]"):
            ring.end()


def test_the_model_waits_for_a_slot(ring: Ring):
    """Two steps that nobody has emptied: the third one waits, until one is."""
    slots = []
    for _ in range(2):
        ring.begin(1)
        for place in range(3):
            ring.keep(place, torch.zeros(1, HIDDEN), None)
        slots.append(ring.end())
    model = threading.Thread(target=ring.begin, args=(1,), daemon=True)
    model.start()
    model.join(0.2)
    assert model.is_alive()
    ring.release(slots[0])
    model.join(10)
    assert not model.is_alive()


def test_requests_are_known_by_their_names_with_and_without_what_vllm_adds():
    for place in Place(12, 345, 346), Place(0, 0, 2):
        assert request_place(place.name()) == request_place(place.name() + "-9f86d081") == place
    assert Place(12, 345, 346).is_last
    assert not Place(0, 0, 2).is_last


WORK = Work(
    "/prepared", "/hidden",
    [Planned("shard-00000.safetensors", 2, 70000, 5, 8), Planned("shard-00001.safetensors", 1, 9, 9, 8)],
    ["shard-00000.safetensors"], "0" * 32, [2, 30, 58, 61], 7168, "bfloat16", 8192, 4, 6, "fp8",
)  # fmt: skip


def test_work_and_reports_are_text():
    assert Work.from_text(WORK.to_text()) == WORK
    report = Report([{"file": "shard-00000.safetensors"}], tell(InputError("extract: sample 3")))
    assert Report.from_text(report.to_text()) == report


@pytest.mark.parametrize("place", ["_take", "_write"])
def test_a_panic_in_a_thread_is_heard_of(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, place: str):
    """What is no Exception, as a panic of a library in Rust is not, would end the thread without a word."""

    class Panic(BaseException):
        pass

    def panic(*_: object) -> None:
        raise Panic("gone")

    write_prepared(tmp_path / "prepared", make_samples([3]))
    planned = [Planned("shard-00000.safetensors", 1, 3, 3, 8)]
    work = Work(
        str(tmp_path / "prepared"), str(tmp_path), planned, [planned[0].file], "0" * 32, [1, 2, 3], HIDDEN, "float32",
        3, 1, 3, None,
    )  # fmt: skip
    ring = Ring(work.expected, 3, 2, torch.device("cpu"))
    monkeypatch.setattr(Writers, place, panic)
    writers = Writers(work, ring)
    ring.begin(3)
    for layer in range(3):
        ring.keep(layer, torch.zeros(3, HIDDEN), None)
    writers.put(Step(ring.end(), torch.arange(3), [Chunk(Place(0, 0, 1).name(), 0, 0, 3)]))
    for _ in range(100):
        if writers.failed:
            break
        time.sleep(0.05)
    error = writers.report().error
    assert error is not None
    assert "Panic: gone" in error["text"]
    writers.close()


RUN = Run(
    name="r", target=TargetSection(path="/x", max_length=2048), prepare=PrepareSection(sources=["x"]),
    extract=ExtractSection(writers=4, max_batched_tokens=8192, max_num_seqs=32, shard_tokens=65536),
)  # fmt: skip
KIMI_TOKEN_BYTES = 57344


def test_memory_is_what_the_settings_say():
    assert bounds.stage_bytes(RUN.extract, KIMI_TOKEN_BYTES) == 8192 * 57344
    assert bounds.host_bytes(RUN.extract, KIMI_TOKEN_BYTES) == 4 * 8192 * 57344 + 6 * 65536 * 57344
    assert bounds.ring_bytes(RUN.extract, KIMI_TOKEN_BYTES) == 4 * 8192 * 57344
    assert bounds.shards_in_hand(RUN.extract) == 4 + 1 + 1
    assert bounds.shards_in_hand(RUN.extract.model_copy(update={"shard_tokens": 8192})) == 4 + 4 + 1
    assert bounds.shards_in_hand(RUN.extract.model_copy(update={"shard_tokens": 32767})) == 4 + 2 + 1
    assert bounds.shards_in_hand(RUN.extract.model_copy(update={"shard_tokens": 10})) == 4 + 4 + 1
    assert bounds.cache_tokens(RUN) == 2048 + 2 * (8192 + 32 * 16)


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (InputError("extract: sample 3: no"), InputError, "extract: sample 3: no"),
        (OSError(errno.ENOSPC, "No space left on device", "/x/shard"), OSError, "No space left on device: '/x/shard'"),
        (KeyError("lost"), RuntimeError, "KeyError: 'lost'"),
    ],
    ids=["user", "disk", "fault"],
)
def test_errors_cross_processes(error: Exception, kind: type[Exception], words: str):
    again = told(tell(error))
    assert type(again) is kind
    assert words in str(again)
    if isinstance(error, OSError):
        assert isinstance(again, OSError)
        assert again.errno == error.errno


def test_an_engine_that_fails_after_its_start_is_ended(monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("vllm")
    from pipeline.extract.stream import engine

    ended = []
    core = SimpleNamespace(shutdown=lambda: ended.append("core"))

    def no_memory(*_, **__):
        raise MemoryError("pinned")

    llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core), collective_rpc=no_memory)
    monkeypatch.setattr(engine.engine, "start", lambda *_, **__: llm)
    target = SimpleNamespace(hidden_size=8, dtype=torch.float32, config={})
    with pytest.raises(MemoryError):
        engine.StreamEngine(RUN, target, [1, 2, 3, 4])  # type: ignore[arg-type]
    assert ended == ["core"]


def test_reports_are_asked_for_soon_where_only_the_disk_is_waited_for():
    """With small shards a report a second would be the limit of the whole."""
    stream = object.__new__(_Stream)
    stream._room, stream._reported = 100, time.monotonic() - 0.5
    stream._held, stream._next = {"0/0/1": 99}, object()  # type: ignore[assignment]
    assert stream._report_is_due()
    stream._held = {"0/0/1": 100}
    assert not stream._report_is_due(), "the model has enough to do"
    stream._held, stream._next = {"0/0/1": 1}, None
    assert not stream._report_is_due(), "there is nothing to ask it for"
    stream._reported -= 1
    assert stream._report_is_due()


@pytest.mark.parametrize(("blocks", "said"), [(1216, False), (1215, True)])
def test_a_cache_that_is_too_small_for_equal_bytes_is_told(capsys: pytest.CaptureFixture[str], blocks: int, said: bool):
    from pipeline.extract.stream import engine

    cache = SimpleNamespace(num_gpu_blocks=blocks, block_size=16)
    config = SimpleNamespace(vllm_config=SimpleNamespace(cache_config=cache))
    engine._tell_if_cramped(RUN, SimpleNamespace(llm_engine=config))  # type: ignore[arg-type]
    told = capsys.readouterr().err
    assert ("19,440 tokens, 19,456 would be needed" in told) if said else told == ""


ENGINE_PROCESS = """
import signal, sys
from pipeline.extract.stream.scheduler import leave_signals_to_the_driver

def end(*_):
    sys.exit(7)  # as vLLM's engine process has it for SIGTERM

signal.signal(signal.SIGTERM, end)
leave_signals_to_the_driver()
print("ready", flush=True)
while True:
    signal.pause()
"""


def test_the_engines_process_leaves_signals_to_the_driver():
    pytest.importorskip("vllm")
    with subprocess.Popen([sys.executable, "-c", ENGINE_PROCESS], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "ready\n" in process.stdout, "after what vLLM says"
        try:
            for number in (signal.SIGTERM, signal.SIGINT):
                process.send_signal(number)
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(0.5)
            process.send_signal(END)
            assert process.wait(10) == 7
        finally:
            process.kill()


@pytest.mark.parametrize("parent", [None, SimpleNamespace(pid=1234)], ids=["the driver's", "its own"])
def test_only_in_a_process_of_its_own_the_scheduler_cares_for_signals_and_driver(
    monkeypatch: pytest.MonkeyPatch, parent: SimpleNamespace | None
):
    pytest.importorskip("vllm")
    from pipeline.extract.stream import scheduler

    done: list[object] = []
    monkeypatch.setattr(scheduler.Scheduler, "__init__", lambda *_: None)
    monkeypatch.setattr(scheduler.multiprocessing, "parent_process", lambda: parent)
    monkeypatch.setattr(scheduler, "leave_signals_to_the_driver", lambda: done.append("signals"))
    monkeypatch.setattr(scheduler, "end_with", done.append)
    scheduler.ByShard()
    assert done == (["signals", 1234] if parent else [])


def test_the_engine_ends_the_process_that_it_started(monkeypatch: pytest.MonkeyPatch):
    """Which hears no other signal."""
    from pipeline.extract.stream.engine import StreamEngine

    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    engine = object.__new__(StreamEngine)
    engine._engine_processes = [SimpleNamespace(pid=sleeper.pid, is_alive=lambda: True)]  # type: ignore[list-item]
    core = SimpleNamespace(shutdown=lambda: None)
    engine._llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core))  # type: ignore[assignment]
    engine.close()
    assert sleeper.wait(10) == -END
    engine.close()
