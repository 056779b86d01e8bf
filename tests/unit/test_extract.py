"""The step without its engine: plan, resume at every point, checks, errors. A stand-in computes states from ids.

What the engine itself computes is tested on the real one, in tests/integration.
"""

import json
import os
import signal
import subprocess
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.__main__ import main
from pipeline.errors import InputError
from pipeline.extract import engines
from pipeline.extract.engines import Captured
from pipeline.extract.plan import Limits, plan
from pipeline.extract.progress import Progress, clock, scaled
from pipeline.extract.speculators_engine import groups
from pipeline.store import exclusive, read_manifest
from pipeline.store.samples import Sample
from pipeline.store.states import StatesReader
from tests.runs import contents, make_samples, write_prepared, write_run

HIDDEN, NUM_LAYERS = 16, 8
LENGTHS = [30, 1, 50, 20, 45, 60, 5, 5]
SHARD_TOKENS = 60
FILES = [f"shard-{n:05d}.safetensors" for n in range(6)]


class StandIn:
    """An engine whose states are a function of the ids; `fault` may change a result."""

    started = 0
    closed = 0

    def __init__(self, config, target, layer_ids: list[int]):
        type(self).started += 1
        self.layer_ids = layer_ids

    def capture(self, batches: Iterable[list[Sample]]) -> Iterator[Captured]:
        for batch in batches:
            for sample in batch:
                ids_S = torch.from_numpy(sample.input_ids_S.astype(np.int64))
                states = [torch.sin(ids_S[:, None] * (layer + 1.0) + torch.arange(HIDDEN)) for layer in self.layer_ids]
                yield self.fault(Captured(ids_S, states), sample)

    def fault(self, captured: Captured, sample: Sample) -> Captured:
        return captured

    def close(self) -> None:
        type(self).closed += 1


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target of which only the configuration and a weight file's bytes are looked at."""
    folder = tmp_path_factory.mktemp("target")
    config = {"model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": NUM_LAYERS, "vocab_size": 300}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> type[StandIn]:
    class Fresh(StandIn):
        pass

    versions = {"engine_version": "stand-in 1", "patches": "none"}
    monkeypatch.setattr(engines, "start", lambda *arguments: Fresh(*arguments))
    monkeypatch.setattr("pipeline.extract.step.engine_versions", lambda: versions)
    return Fresh


@pytest.fixture
def config(tmp_path: Path, target: Path) -> Path:
    return write_run(tmp_path, target, make_samples(LENGTHS), shard_tokens=SHARD_TOKENS, max_length=64)


@pytest.fixture
def hidden(config: Path) -> Path:
    return config.parent / "runs" / "test" / "hidden"


def extract(config: Path, *flags: str) -> int:
    return main(["extract", "--config", str(config), *flags])


@pytest.fixture
def undisturbed(tmp_path_factory: pytest.TempPathFactory, target: Path) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("undisturbed")
    config = write_run(folder, target, make_samples(LENGTHS), shard_tokens=SHARD_TOKENS, max_length=64)
    assert extract(config) == 0
    return contents(folder / "runs" / "test" / "hidden")


# ---- Plan


def test_plan_covers_all_samples_in_order_and_keeps_to_the_size(tmp_path: Path):
    write_prepared(tmp_path, make_samples(LENGTHS))
    planned = plan(tmp_path, SHARD_TOKENS, Limits(300, 64))
    want = [(2, 31), (1, 50), (1, 20), (1, 45), (1, 60), (2, 10)]
    assert [(shard.samples, shard.tokens) for shard in planned] == want
    assert [shard.file for shard in planned] == FILES
    assert sum(shard.supervised for shard in planned) == sum(s.loss_mask_S.sum() for s in make_samples(LENGTHS))


def test_sample_larger_than_a_shard_has_its_own(tmp_path: Path):
    write_prepared(tmp_path, make_samples([3, 50, 3]))
    planned = plan(tmp_path, 10, Limits(300, 64))
    assert [shard.tokens for shard in planned] == [3, 50, 3]


def test_groups_keep_to_both_limits():
    samples = make_samples([5, 5, 5, 20, 1, 1, 1, 1])
    got = [[len(sample.input_ids_S) for sample in group] for group in groups(samples, 12, 3)]
    assert got == [[5, 5], [5], [20], [1, 1, 1], [1]]
    assert list(groups([], 12, 3)) == []


# ---- What is left behind


def test_states_are_read_back(config: Path, hidden: Path):
    assert extract(config) == 0
    reader = StatesReader(hidden)
    for index, sample in enumerate(make_samples(LENGTHS)):
        got = reader.read(index)
        ids_S = got.input_ids_S
        assert ids_S.tolist() == sample.input_ids_S.tolist()
        for slot, layer in enumerate([2, 4, 5]):
            want = torch.sin(ids_S[:, None] * (layer + 1.0) + torch.arange(HIDDEN))
            assert torch.equal(got.aux_states_SLH[:, slot], want)
        assert torch.equal(got.last_states_SH, torch.sin(ids_S[:, None] * (NUM_LAYERS + 1.0) + torch.arange(HIDDEN)))
    assert reader.manifest.totals["supervised_tokens"] == int(reader.num_supervised_N.sum())


def test_finished_folder_starts_no_engine(config: Path, stand_in: type[StandIn], capsys: pytest.CaptureFixture[str]):
    assert extract(config) == 0
    assert extract(config) == 0
    assert stand_in.started == stand_in.closed == 1
    assert "nothing to do" in capsys.readouterr().out


# ---- Interruptions


def killed_at(config: Path, event: int) -> bool:
    """Run the step in a child that kills itself at its `event`-th rename, before or after it. False: it finished."""
    child = os.fork()
    if not child:
        events = iter(range(10**6))
        rename = os.replace

        def rename_or_die(*arguments, **keywords):
            if next(events) == event:
                os.kill(os.getpid(), signal.SIGKILL)
            rename(*arguments, **keywords)
            if next(events) == event:
                os.kill(os.getpid(), signal.SIGKILL)

        os.replace = rename_or_die
        os._exit(extract(config))
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def test_killed_at_every_write_and_run_again_gives_the_same_bytes(
    tmp_path: Path, target: Path, undisturbed: dict[str, str]
):
    """Plan, shards, records, manifest: each rename is a state in which a killed run may leave the folder."""
    kills = 0
    while True:
        folder = tmp_path / str(kills)
        config = write_run(folder, target, make_samples(LENGTHS), shard_tokens=SHARD_TOKENS, max_length=64)
        killed = killed_at(config, kills)
        assert extract(config) == 0
        assert contents(folder / "runs" / "test" / "hidden") == undisturbed, f"killed at event {kills}"
        if not killed:
            break
        kills += 1
    assert kills == 2 * (1 + 2 * len([name for name in undisturbed if name.startswith("shard")]) + 1)


def test_killed_again_and_again(config: Path, hidden: Path, undisturbed: dict[str, str]):
    """Each attempt gets one shard further."""
    attempts = 0
    while killed_at(config, 5 if attempts == 0 else 3):
        attempts += 1
        assert attempts < 20
    assert attempts >= 3
    assert contents(hidden) == undisturbed


@pytest.mark.parametrize("damage", ["flip", "cut", "swap", "empty", "no record", "torn record", "foreign record"])
def test_damaged_shard_of_an_unfinished_folder_is_made_again(
    config: Path, hidden: Path, undisturbed: dict[str, str], damage: str, capsys: pytest.CaptureFixture[str]
):
    assert killed_at(config, 12)  # plan, two shards, two records and the third shard are there
    shard, record = hidden / FILES[0], hidden / "shard-00000.json"
    if damage == "flip":
        data = bytearray(shard.read_bytes())
        data[len(data) // 2] ^= 4
        shard.write_bytes(data)
    elif damage == "cut":
        os.truncate(shard, 1000)
    elif damage == "swap":
        shard.write_bytes((hidden / FILES[1]).read_bytes())
    elif damage == "empty":
        shard.write_bytes(b"")
    elif damage == "no record":
        record.unlink()
    elif damage == "torn record":
        record.write_bytes(record.read_bytes()[:30])
    else:
        record.write_text(json.dumps({**json.loads(record.read_text()), "run_key": "0"}))
    capsys.readouterr()
    assert extract(config) == 0
    assert contents(hidden) == undisturbed
    assert f"to be made again ({FILES[0]}" in capsys.readouterr().out


@pytest.mark.parametrize("damage", ["missing", "cut", "foreign"])
def test_damaged_shard_of_a_finished_folder_is_made_again(
    config: Path, hidden: Path, undisturbed: dict[str, str], damage: str, stand_in: type[StandIn]
):
    assert extract(config) == 0
    shard = hidden / FILES[1]
    if damage == "missing":
        shard.unlink()
    elif damage == "cut":
        os.truncate(shard, 100)
    else:
        shard.write_bytes(shard.read_bytes().replace(b"run_key", b"run_kex"))
    before = stand_in.started
    assert extract(config) == 0
    assert contents(hidden) == undisturbed
    assert stand_in.started == before + 1


def test_leftovers_of_killed_writers_are_removed(config: Path, hidden: Path, undisturbed: dict[str, str]):
    assert killed_at(config, 4)
    (hidden / ".tmpA1b2C3").write_bytes(b"x")  # safetensors' own temporary file
    (hidden / ".shard-00099.safetensors.tmp").write_bytes(b"x")
    assert extract(config) == 0
    assert contents(hidden) == undisturbed


def test_two_at_once(config: Path, hidden: Path, capsys: pytest.CaptureFixture[str]):
    with exclusive(hidden, "extract"):
        assert extract(config) == 3
    assert f"is being written by process {os.getpid()}" in capsys.readouterr().err
    assert not (hidden / "plan.json").exists()


# ---- Full disk


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_too_little_room_is_told_before_the_engine_starts(
    small_disk: Path, target: Path, stand_in: type[StandIn], capsys: pytest.CaptureFixture[str]
):
    config = write_run(small_disk, target, make_samples([64] * 20), shard_tokens=SHARD_TOKENS, max_length=64)
    assert extract(config) == 5
    message = capsys.readouterr().err
    assert "0.00 GB free" in message or "MB free" in message
    assert len(message.splitlines()) == 1
    assert stand_in.started == 0


def test_disk_that_fills_up_meanwhile(
    small_disk: Path,
    target: Path,
    undisturbed: dict[str, str],
    stand_in: type[StandIn],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    config = write_run(small_disk, target, make_samples(LENGTHS), shard_tokens=SHARD_TOKENS, max_length=64)
    hidden = small_disk / "runs" / "test" / "hidden"
    ballast = small_disk / "ballast"

    def fill(self, captured: Captured, sample: Sample) -> Captured:
        if sample.sample_id == "sample-4":
            with ballast.open("wb", buffering=0) as file, suppress(OSError):
                while file.write(bytes(4096)):
                    pass
        return captured

    with monkeypatch.context() as patch:
        patch.setattr(stand_in, "fault", fill)
        assert extract(config) == 5
    message = capsys.readouterr().err
    assert "no room left on the disk" in message
    assert "it goes on" in message
    assert stand_in.closed == stand_in.started
    assert not [name for name in contents(hidden) if name.startswith(".") or name == "manifest.json"]
    ballast.unlink()
    assert extract(config) == 0
    assert contents(hidden) == undisturbed


# ---- Wrong states


def not_finite(captured: Captured) -> None:
    captured.states_LSH[1][2, 3] = float("nan")


def infinite(captured: Captured) -> None:
    captured.states_LSH[-1][0, 0] = float("inf")


def shorter(captured: Captured) -> None:
    captured.states_LSH[0] = captured.states_LSH[0][:-1]


def other_dtype(captured: Captured) -> None:
    captured.states_LSH[2] = captured.states_LSH[2].half()


def one_layer_less(captured: Captured) -> None:
    captured.states_LSH.pop()


def other_ids(captured: Captured) -> None:
    captured.input_ids_S[1] += 1


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (not_finite, "layer 4 are not finite from token 2 on"),
        (infinite, "layer 8 are not finite from token 0 on"),
        (shorter, "layer 2 are [44, 16], not [45, 16]"),
        (other_dtype, "layer 5 are torch.float16, not torch.float32"),
        (one_layer_less, "states of 3 layers, not 4"),
        (other_ids, "other token ids"),
    ],
)
def test_wrong_states_are_never_written(
    config: Path,
    hidden: Path,
    undisturbed: dict[str, str],
    stand_in: type[StandIn],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fault,
    words: str,
):
    """One line that names the sample; what was finished before it stays, and the next run goes on."""

    def on_sample_4(self, captured: Captured, sample: Sample) -> Captured:
        if sample.sample_id == "sample-4":
            fault(captured)
        return captured

    with monkeypatch.context() as patch:
        patch.setattr(stand_in, "fault", on_sample_4)
        assert extract(config) == 4
    (message,) = capsys.readouterr().err.splitlines()
    assert message.startswith("extract: sample sample-4: ")
    assert words in message
    assert stand_in.closed == stand_in.started
    assert not (hidden / "manifest.json").exists()
    assert FILES[0] in contents(hidden)
    assert extract(config) == 0
    assert contents(hidden) == undisturbed


def test_engine_is_closed_on_ctrl_c(config: Path, stand_in: type[StandIn], monkeypatch: pytest.MonkeyPatch):
    def interrupt(self, captured: Captured, sample: Sample) -> Captured:
        raise KeyboardInterrupt

    monkeypatch.setattr(stand_in, "fault", interrupt)
    assert extract(config) == 130
    assert stand_in.closed == stand_in.started


# ---- Bad input


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("extract: ") or line.startswith("prepare: ")
    return line


def test_unfinished_prepared_folder(config: Path, hidden: Path, capsys: pytest.CaptureFixture[str]):
    (hidden.parent / "prepared" / "manifest.json").unlink()
    assert extract(config) == 4
    assert "is not finished (no manifest.json). Run the prepare step first" in one_line(capsys)
    assert not hidden.exists()


@pytest.mark.parametrize("layers", ["[2, 4, 9]", "[0, 1, 100]"])
def test_layer_out_of_range(config: Path, hidden: Path, layers: str, capsys: pytest.CaptureFixture[str]):
    assert extract(config, "--extract.aux_layers", layers) == 4
    assert "which has 8 layers" in one_line(capsys)
    assert not hidden.exists()


def test_first_and_last_layer_are_allowed(config: Path, hidden: Path):
    assert extract(config, "--extract.aux_layers", "[0, 1, 8]") == 0
    sample = StatesReader(hidden).read(2)
    assert torch.equal(sample.aux_states_SLH[:, 2], sample.last_states_SH)


@pytest.mark.parametrize(
    ("ids", "mask", "words"),
    [
        ([1, 300], [True, True], "token id 300, the target knows 0 to 299"),
        ([-1, 1], [True, True], "token id -1"),
        ([], [], "has 0 tokens"),
        ([1] * 65, [True] * 65, "has 65 tokens, 1 to 64"),
        ([1, 2], [True], "2 tokens and 1 mask values"),
    ],
)
def test_sample_that_the_target_cannot_take(
    config: Path, hidden: Path, ids: list[int], mask: list[bool], words: str, capsys: pytest.CaptureFixture[str]
):
    bad = Sample("the-bad-one", "c", np.array(ids, np.int32), np.array(mask, bool))
    write_prepared(hidden.parent / "prepared", [*make_samples([4, 5]), bad])
    assert extract(config) == 4
    line = one_line(capsys)
    assert "sample the-bad-one has " in line
    assert words in line


def test_no_samples(config: Path, hidden: Path, capsys: pytest.CaptureFixture[str]):
    write_prepared(hidden.parent / "prepared", [])
    assert extract(config) == 4
    assert "holds no samples" in one_line(capsys)


def test_other_settings_are_refused(config: Path, hidden: Path, capsys: pytest.CaptureFixture[str]):
    assert killed_at(config, 8)
    before = contents(hidden)
    assert extract(config, "--extract.aux_layers", "[1, 2, 3]") == 3
    message = capsys.readouterr().err
    assert "was made with aux_layers [2, 4, 5], this run has [1, 2, 3]" in message
    assert contents(hidden) == before
    write_prepared(hidden.parent / "prepared", make_samples([3, 4]), "another")
    assert extract(config) == 3
    assert "was made with prepared" in capsys.readouterr().err
    assert contents(hidden) == before


def test_unpatched_speculators_is_told(monkeypatch: pytest.MonkeyPatch):
    from pipeline import patching
    from pipeline.extract.versions import engine_versions

    def pristine(action: str, package: str) -> str:
        raise patching.PatchingError(5, "speculators is pristine, not patched: run apply speculators")

    monkeypatch.setattr(patching, "run", pristine)
    with pytest.raises(InputError, match=r"not patched.*make setup"):
        engine_versions()


# ---- Progress


def test_progress_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    now = iter([100.0, 110.0] + [140.0] * 9)
    monkeypatch.setattr("pipeline.extract.progress.time.monotonic", lambda: next(now))
    progress = Progress(tmp_path, 100, 2_000_000, done_samples=10, done_tokens=200_000, written_bytes=1_500_000_000)
    progress.begin()
    progress.advance(100_000)
    progress.advance(100_000)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("extract  12/100 samples  400.0 ktok  5,000 tok/s  1.5 GB written, ")
    assert line.endswith(" free  0:40 elapsed, about 5:20 left")


def test_units():
    assert [scaled(n) for n in (999, 1000, 26_200_000, 1.5e12)] == ["999 ", "1.0 k", "26.2 M", "1.5 T"]
    assert [clock(s) for s in (0, 59.6, 724, 4920)] == ["0:00", "1:00", "12:04", "1 h 22"]


def test_manifest_names_what_made_it(config: Path, hidden: Path):
    assert extract(config) == 0
    assert sorted(read_manifest(hidden, "extract").inputs) == [
        "aux_layers",
        "dtype",
        "engine",
        "engine_version",
        "last_layer",
        "max_length",
        "patches",
        "prepared",
        "shard_tokens",
        "target",
    ]
