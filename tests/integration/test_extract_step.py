"""The step from the command line, engine `speculators`: what it leaves, and what interruptions change (nothing)."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from pipeline.__main__ import main
from pipeline.store import read_manifest, verify
from pipeline.store.states import StatesReader
from tests.models import Reference, max_relative_error
from tests.runs import contents, make_samples, write_run

pytest.importorskip("vllm")

ROOT = Path(__file__).parents[2]
LENGTHS = [120, 1, 333, 64, 200, 200, 17, 380, 512, 5, 90, 150]
SHARD_TOKENS = 400

STOP_AFTER = """
import os, sys
from pipeline.__main__ import main
from pipeline.extract import step

shards, signal_number, record = int(sys.argv[1]), int(sys.argv[2]), step.record

def record_and_stop(*arguments):
    global shards
    record(*arguments)
    shards -= 1
    if not shards:
        children = open(f"/proc/self/task/{os.getpid()}/children").read()
        print("children:", children, flush=True)
        os.kill(os.getpid(), signal_number)

step.record = record_and_stop
if __name__ == "__main__":
    sys.exit(main(["extract", "--config", sys.argv[3]]))
"""


@pytest.fixture(scope="module")
def undisturbed(llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was extracted in one go."""
    folder = tmp_path_factory.mktemp("undisturbed")
    config = write_run(folder, llama_folder, make_samples(LENGTHS), shard_tokens=SHARD_TOKENS, engine="speculators")
    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "extract", "--config", str(config)],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) == 1, "the step says one closing line, the engine nothing"
    assert "12 samples, 2.1 ktok" in done.stdout
    return folder


TAKES_CTRL_C = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
"""As at a terminal: a shell starts its background jobs, and so perhaps the tests, with SIGINT ignored."""


def stopped(config: Path, script: Path, shards: int, signal_number: int) -> subprocess.CompletedProcess:
    """Run the step in a process that gets a signal after so many shards; its workers must go with it."""
    script.write_text(TAKES_CTRL_C + STOP_AFTER)
    done = subprocess.run(
        [sys.executable, str(script), str(shards), str(signal_number), str(config)],
        cwd=ROOT, capture_output=True, text=True, timeout=200, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("children:")]
    children = [int(pid) for pid in line.split()[1:]]
    assert children, "no worker was running"
    deadline = time.monotonic() + 20
    while alive := [pid for pid in children if running(pid)]:
        assert time.monotonic() < deadline, f"orphans: {alive}"
        time.sleep(0.1)
    return done


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_folder_holds_what_hugging_face_computes(undisturbed: Path, llama_folder: Path):
    folder = undisturbed / "runs" / "test" / "hidden"
    manifest = read_manifest(folder, "extract")
    verify(folder, manifest)
    samples, reference = make_samples(LENGTHS), Reference(llama_folder)
    assert [shard.tokens for shard in manifest.shards] == [121, 397, 400, 397, 512, 245]
    assert manifest.inputs["aux_layers"] == [2, 4, 5]
    assert manifest.totals == {
        "samples": 12,
        "tokens": sum(LENGTHS),
        "supervised_tokens": sum(int(sample.loss_mask_S.sum()) for sample in samples),
        "size_bytes": sum(shard.size_bytes for shard in manifest.shards),
        "aux_layers": [2, 4, 5],
        "last_layer": 8,
        "hidden_size": 128,
        "dtype": "float32",
    }
    reader = StatesReader(folder)
    assert reader.sample_ids == [sample.sample_id for sample in samples]
    for index, sample in enumerate(samples):
        got = reader.read(index)
        assert got.input_ids_S.tolist() == sample.input_ids_S.tolist()
        assert got.loss_mask_S.tolist() == sample.loss_mask_S.tolist()
        want = reference.states(got.input_ids_S.tolist())
        assert max_relative_error(got.last_states_SH, want[8]) < 1e-4
        for slot, layer in enumerate([2, 4, 5]):
            assert max_relative_error(got.aux_states_SLH[:, slot], want[layer]) < 1e-4
        assert got.last_states_SH.dtype == torch.float32
    assert sorted(contents(folder)) == ["manifest.json", "plan.json", *(shard.file for shard in manifest.shards)]


def test_interrupted_twice_and_damaged_gives_the_same_bytes(undisturbed: Path, llama_folder: Path, tmp_path: Path):
    """Ctrl-C, kill -9, a flipped bit, a torn record, a foreign shard, leftovers; then one run that goes on."""
    config = write_run(tmp_path, llama_folder, make_samples(LENGTHS), shard_tokens=SHARD_TOKENS, engine="speculators")
    folder = tmp_path / "runs" / "test" / "hidden"

    done = stopped(config, tmp_path / "stop.py", 2, signal.SIGINT)
    assert done.returncode == 130
    assert done.stderr.splitlines()[-1] == "extract: stopped. Run it again: it goes on"
    assert "Traceback" not in done.stderr
    done = stopped(config, tmp_path / "stop.py", 2, signal.SIGKILL)
    assert done.returncode == -signal.SIGKILL
    assert not (folder / "manifest.json").exists()
    assert len(list(folder.glob("shard-*.safetensors"))) == 4

    flipped = folder / "shard-00000.safetensors"
    data = bytearray(flipped.read_bytes())
    data[-5] ^= 1
    flipped.write_bytes(data)
    (folder / "shard-00002.json").write_text('{"run_key": "')
    (folder / "shard-00005.safetensors").write_bytes(b"foreign")
    (folder / ".shard-00004.safetensors.tmp").write_bytes(b"torn")
    (folder / ".shard-00099.safetensors.tmp").write_bytes(b"of a killed writer")

    done = subprocess.run(
        [sys.executable, "-m", "pipeline", "extract", "--config", str(config)],
        cwd=ROOT, capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 of 6 shards are finished and verified, 3 unfinished or altered to be made again" in done.stdout
    assert contents(folder) == contents(undisturbed / "runs" / "test" / "hidden")


def test_finished_folder_is_left_alone(undisturbed: Path, capsys: pytest.CaptureFixture[str]):
    before = contents(undisturbed / "runs" / "test" / "hidden")
    assert main(["extract", "--config", str(undisturbed / "run.toml")]) == 0
    assert "already done: 12 samples" in capsys.readouterr().out
    assert contents(undisturbed / "runs" / "test" / "hidden") == before


@pytest.mark.parametrize(
    ("flag", "value", "words"),
    [
        ("aux_layers", "[1, 4, 5]", "was made with aux_layers [2, 4, 5], this run has [1, 4, 5]"),
        ("shard_tokens", "500", "was made with shard_tokens 400, this run has 500"),
    ],
)
def test_other_settings_are_refused(
    undisturbed: Path, capsys: pytest.CaptureFixture[str], flag: str, value: str, words: str
):
    folder = undisturbed / "runs" / "test" / "hidden"
    before = contents(folder)
    assert main(["extract", "--config", str(undisturbed / "run.toml"), f"--extract.{flag}", value]) == 3
    message = capsys.readouterr().err
    assert message.startswith(f"extract: {folder} {words}")
    assert "nothing was changed" in message
    assert contents(folder) == before
