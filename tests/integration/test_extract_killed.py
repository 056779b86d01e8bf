"""The step on the real engine, killed, stopped and refused by the disk; both engines, and the bytes stay the same.

Each attempt is a process of its own, made by a zygote that has imported vLLM (tests/zygote.py). The same on a stand-in
for the engine, with more cases: tests/unit/extract.
"""

import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pipeline.store import file_sha256, read_manifest
from tests.extraction import FILES, LENGTHS, MANIFEST, POINTS, SHARD_TOKENS, around_rename
from tests.runs import contents, damaged, inodes, kept, make_samples, small_file_system, write_run
from tests.soak import SMALL_STEPS, Campaign
from tests.zygote import Act, Zygote

pytest.importorskip("vllm")

HERE = "tests.integration.test_extract_killed"


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    with Zygote(tmp_path_factory.mktemp("attempts")) as process:
        yield process


@dataclass(frozen=True)
class Bench:
    """An engine, and what an undisturbed run of it leaves."""

    engine: str
    zygote: Zygote
    undisturbed: dict[str, str]

    @property
    def flags(self) -> list[str]:
        """One writer: shards are written one after the other, as the named points want it."""
        return ["--extract.engine", self.engine, "--extract.writers", "1", *SMALL_STEPS]

    def extract(self, config: Path, act: Act | None = None) -> tuple[int, str]:
        """One attempt: its exit code, and what it said."""
        return self.zygote.run("extract", "--config", str(config), *self.flags, act=act)


@pytest.fixture(scope="module", params=["stream", "speculators"])
def bench(
    request: pytest.FixtureRequest, zygote: Zygote, llama_folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> Bench:
    new = Bench(request.param, zygote, {})
    whole = write_small(tmp_path_factory.mktemp("undisturbed"), llama_folder)
    return replace(new, undisturbed=contents(extracted(new, whole)))


def extracted(bench: Bench, config: Path) -> Path:
    """The hidden/ of an undisturbed run."""
    code, said = bench.extract(config)
    assert code == 0, said
    return hidden_of(config)


def write_small(folder: Path, target: Path) -> Path:
    """Six shards: FILES."""
    return write_run(folder, target, make_samples(LENGTHS), shard_tokens=SHARD_TOKENS, max_length=64)


def hidden_of(config: Path) -> Path:
    return config.parent / "runs" / "test" / "hidden"


@pytest.fixture
def config(tmp_path: Path, llama_folder: Path) -> Path:
    return write_small(tmp_path, llama_folder)


def goes_on(bench: Bench, config: Path) -> None:
    """Whole shards are in place, none is made again; an undisturbed attempt ends with an undisturbed run's bytes."""
    hidden = hidden_of(config)
    there = kept(hidden)
    for name in there:
        assert file_sha256(hidden / f"{name}.safetensors") == bench.undisturbed[f"{name}.safetensors"], name
    code, said = bench.extract(config)
    assert code == 0, said
    assert contents(hidden) == bench.undisturbed
    assert there.items() <= inodes(hidden).items(), "made again"


# ---- SIGKILL


@pytest.mark.parametrize(("engine", "kills"), [("stream", 24), ("speculators", 6)])
def test_thirty_kills_at_random_moments(zygote: Zygote, llama_folder: Path, tmp_path: Path, engine: str, kills: int):
    """Few while the engine is loaded, most while it computes and writes; `make soak` is the longer one."""
    flags = ["--extract.engine", engine, *SMALL_STEPS]
    result = Campaign(tmp_path, llama_folder, kills, seed=1, begin=zygote.begin, flags=flags).run()
    assert result.kills >= kills
    assert result.loading <= result.kills / 2


def test_killed_at_each_named_point_loses_unfinished_shards_only(bench: Bench, config: Path):
    """One point after the other, in one folder: each attempt goes on where the one before was killed."""
    hidden, before = hidden_of(config), {}
    for point in POINTS:
        code, said = bench.extract(config, act=("tests.extraction:arm", point))
        assert code == -signal.SIGKILL, f"{point}: {said}"
        assert (hidden / MANIFEST).exists() == (point == "after the manifest"), point
        now = kept(hidden)
        for name in now:
            assert file_sha256(hidden / f"{name}.safetensors") == bench.undisturbed[f"{name}.safetensors"], point
        assert before.items() <= now.items(), f"{point}: made again"
        wanted = {"before the manifest": 6, "after the manifest": 6, "after the record": 3}.get(point, 2)
        assert len(now) == wanted or (len(now) < wanted and point == POINTS[0]), point
        before = now
    goes_on(bench, config)


def end_after_shards(how: str) -> None:
    """In the process: `kill -9`, or Ctrl-C for it and its worker, after the first shards that are written."""
    from pipeline.extract.stream.engine import StreamEngine

    signal.signal(signal.SIGINT, signal.default_int_handler)  # as at a terminal: a shell may have it ignored
    write = StreamEngine.write

    def write_and_end(self: StreamEngine, *order):
        first = True
        for went in write(self, *order):
            yield went
            if went.written and first:
                first = False
                children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
                print("children:", len(children), flush=True)
                os.kill(os.getpid(), signal.SIGKILL) if how == "kill -9" else os.killpg(0, signal.SIGINT)

    StreamEngine.write = write_and_end


def test_a_worker_in_a_process_of_its_own_goes_with_its_driver(bench: Bench, llama_folder: Path, tmp_path: Path):
    """As vLLM starts it on a GPU, spawned. It writes no more, and leaves on Ctrl-C the shards in hand finished."""
    if bench.engine != "stream":
        pytest.skip("its workers have processes of their own anyway")
    config, whole = (
        write_run(tmp_path / name, llama_folder, make_samples([40] * 60), shard_tokens=40) for name in "ab"
    )
    bench = replace(bench, undisturbed=contents(extracted(bench, whole)))
    hidden, before = hidden_of(config), 0
    for how, wanted in [("kill -9", -signal.SIGKILL), ("Ctrl-C", 130)]:
        attempt = bench.zygote.begin(
            ["extract", "--config", str(config), *bench.flags],
            act=(f"{HERE}:end_after_shards", how),
            environment={"VLLM_ENABLE_V1_MULTIPROCESSING": "1"},
        )
        assert attempt.end() == wanted, attempt.said
        assert "children: 0" not in attempt.said
        assert "could not be finished" not in attempt.said, "the engine left with the signal"
        assert before < len(kept(hidden)) < 60, how
        before = len(kept(hidden))
    assert sorted(path.stem for path in hidden.glob("*.safetensors")) == sorted(kept(hidden))
    assert not list(hidden.glob(".*tmp*"))
    goes_on(bench, config)


# ---- The same without interruptions


def slowly() -> None:
    """In the process: requests come late, and each shard takes another time to be written."""
    import random
    import time

    from pipeline.extract.stream import engine, writer

    chance, ask, write = random.Random(0), engine._Stream._ask, writer.write_states

    def ask_slowly(self: engine._Stream, *arguments) -> None:
        ask(self, *arguments)
        self._llm.llm_engine.engine_core.engine_core.step_fn()  # type: ignore[attr-defined]

    def write_slowly(*arguments, **keywords):
        time.sleep(chance.random() / 5)
        return write(*arguments, **keywords)

    engine._Stream._ask = ask_slowly
    writer.write_states = write_slowly


def test_two_runs_have_the_same_checksums_whatever_the_clock_does(bench: Bench, config: Path):
    code, said = bench.extract(config, act=(f"{HERE}:slowly",))
    assert code == 0, said
    assert contents(hidden_of(config)) == bench.undisturbed


LONG = [120, 1, 333, 64, 200, 200, 17, 380, 512, 5, 90, 150]


def long_run(zygote: Zygote, folder: Path, target: Path, *flags: str) -> Path:
    """The hidden/ of samples that take several steps."""
    config = write_run(folder, target, make_samples(LONG))
    code, said = zygote.run("extract", "--config", str(config), *flags)
    assert code == 0, said
    assert len([line for line in said.splitlines() if line.startswith("extract  12 samples, 2.1 ktok")]) == 1
    return hidden_of(config)


def without_run_key(folder: Path) -> dict[str, bytes]:
    """The shards' bytes; the run key names the engine."""
    key = read_manifest(folder, "extract").run_key.encode()
    return {path.name: path.read_bytes().replace(key, b"") for path in sorted(folder.glob("shard-*"))}


@pytest.mark.parametrize("store_dtype", [None, "fp8"])
def test_both_engines_write_the_same_files(zygote: Zygote, llama_folder: Path, tmp_path: Path, store_dtype: str | None):
    """Samples of several steps, which are cut otherwise: 300 tokens at most, of one shard."""
    stored = ["--extract.store_dtype", store_dtype] if store_dtype else []
    flags = [
        "--extract.engine",
        "stream",
        "--extract.max_batched_tokens",
        "300",
        "--extract.max_num_seqs",
        "8",
        *stored,
    ]
    by_stream = without_run_key(long_run(zygote, tmp_path / "stream", llama_folder, *flags))
    assert by_stream == without_run_key(long_run(zygote, tmp_path / "speculators", llama_folder, *stored))
    assert all((b"F8_E4M3" in data) == (store_dtype == "fp8") for data in by_stream.values())


# ---- SIGTERM


def stop_in_commit(asked: str) -> None:
    """In the process: SIGTERM between a shard's file and its name, which takes its time, so that what is in hand is not
    finished by chance. The samples that were asked for, and not taken back, go to `asked`."""
    from pipeline.extract.stream import engine

    ask, take_back = engine._Stream._ask, engine._Stream._take_back
    samples: dict[str, str] = {}

    def note() -> None:
        Path(asked).write_text("".join(f"{sample}\n" for sample in samples.values()))

    def ask_and_note(self: engine._Stream, name: str, sample) -> None:
        ask(self, name, sample)
        samples[name] = sample.sample_id
        note()

    def take_back_and_note(self: engine._Stream, names: list[str]) -> None:
        for name in names:
            del samples[name]
        note()
        take_back(self, names)

    engine._Stream._ask, engine._Stream._take_back = ask_and_note, take_back_and_note

    def stop_and_linger() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.3)

    around_rename(FILES[1], stop_and_linger, before=True)


def test_sigterm_during_a_commit_lets_the_shards_in_hand_be_finished(bench: Bench, llama_folder: Path, tmp_path: Path):
    """Of twenty, of one sample each."""
    config, whole = (
        write_run(tmp_path / name, llama_folder, make_samples([40] * 20), shard_tokens=40) for name in "ab"
    )
    bench = replace(bench, undisturbed=contents(extracted(bench, whole)))
    hidden, asked = hidden_of(config), config.parent / "asked"
    code, said = bench.extract(config, act=(f"{HERE}:stop_in_commit", str(asked)))
    assert code == 143, said
    assert "extract: stopped. Run it again: it goes on" in said
    finished = sorted(kept(hidden))
    assert sorted(path.stem for path in hidden.glob("*.safetensors")) == finished
    assert not list(hidden.glob(".*tmp*"))
    if bench.engine == "stream":
        assert 2 <= len(finished) < 20
        samples = [f"sample-{n}" for n in range(len(finished))]
        assert asked.read_text().split() == samples, "asked for, and not written"
    else:
        assert len(finished) == 2
    goes_on(bench, config)


# ---- The disk


def fill_at_commit(ballast: str) -> None:
    """In the process: as if another one took all that is left of the disk while the second shard gets its name."""

    def fill() -> None:
        with Path(ballast).open("wb", buffering=0) as file, suppress(OSError):
            while file.write(bytes(4096)):
                pass

    around_rename(FILES[1], fill, before=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1.5 MB."""
    with small_file_system(tmp_path / "disk", "1536k") as folder:
        yield folder


def test_a_disk_that_fills_up_ends_the_run_and_keeps_what_is_verified(
    bench: Bench, small_disk: Path, llama_folder: Path
):
    config, ballast = write_small(small_disk, llama_folder), small_disk / "ballast"
    hidden = hidden_of(config)
    code, said = bench.extract(config, act=(f"{HERE}:fill_at_commit", str(ballast)))
    assert code == 5, said
    (line,) = [line for line in said.splitlines() if "no room left on the disk" in line]
    assert "it goes on" in line
    assert list(kept(hidden)) == ["shard-00000"]
    assert not list(hidden.glob(".*tmp*"))
    assert not (hidden / MANIFEST).exists()
    ballast.unlink()
    goes_on(bench, config)


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_damaged_shards_are_made_again(bench: Bench, config: Path):
    """Flipped, cut, deleted, and one in another one's place, in a folder that was finished."""
    if bench.engine != "stream":
        pytest.skip("one engine shows it: what is verified is not the engine's")
    hidden = extracted(bench, config)
    flip(hidden / FILES[0])
    os.truncate(hidden / FILES[1], 1000)
    (hidden / FILES[2]).unlink()
    shutil.copy(hidden / FILES[4], hidden / FILES[3])
    goes_on(bench, config)
    assert damaged(hidden) == [f"{name}.damaged-1" for name in (FILES[0], FILES[1], FILES[3])]


# ---- A second writer


def test_a_second_process_is_refused_by_the_first_ones_number(bench: Bench, config: Path):
    if bench.engine != "stream":
        pytest.skip("one engine shows it: the folder is locked before it starts")
    first = bench.zygote.begin(["extract", "--config", str(config), *bench.flags])
    assert first.wait_until_ready(), first.said
    os.kill(first.pid, signal.SIGSTOP)
    code, said = bench.extract(config)
    os.kill(first.pid, signal.SIGCONT)
    assert code == 6, said
    assert f"is being written by process {first.pid} on " in said
    assert first.end() == 0, first.said
    assert contents(hidden_of(config)) == bench.undisturbed
