"""The services, run for real on a tiny model without a GPU."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkout import USER_ID, Checkout
from tests.runs import contents, inodes, kept

FOLDERS = ("prepared", "hidden", "vocab", "checkpoints")


@pytest.fixture(scope="module")
def trained(checkout: Checkout) -> str:
    """What `docker compose up train` says on the tiny run."""
    return checkout.compose("up", "--attach-dependencies", "train").stdout


def manifests(checkout: Checkout, run: str) -> dict[str, tuple[int, str]]:
    files = [checkout.folder / "runs" / run / name / "manifest.json" for name in FOLDERS]
    return {str(file): (file.stat().st_mtime_ns, file.read_text()) for file in files}


def test_up_train_runs_what_it_needs(checkout, trained):
    manifests(checkout, "few")
    order = [trained.index(f"{step}  ") for step in ("prepare", "extract", "train")]
    assert order == sorted(order)
    written = [path for path in (checkout.folder / "runs" / "few").rglob("*") if not path.is_symlink()]
    assert {path.stat().st_uid for path in written} == {USER_ID}


def test_up_train_again_does_nothing(checkout, trained):
    before = manifests(checkout, "few")
    told = checkout.compose("up", "--attach-dependencies", "train").stdout
    assert manifests(checkout, "few") == before
    assert told.count("already done") == len(FOLDERS) + 1  # training and train


def test_evaluate_and_report(checkout, trained):
    assert "acceptance length" in checkout.step("evaluate", "--evaluate.limit", "4").stdout
    told = checkout.run("make", "report").stdout
    assert "acceptance length" in told
    assert "runs/few/checkpoints/best" in told


def test_merge_of_a_folder_that_is_whole(checkout, trained):
    told = checkout.run("make", "merge").stdout
    assert "merge  " in told
    assert "shards: runs/few/hidden" in told


def test_the_benchmark_of_extract(checkout):
    """A few seconds of it: with the image's packages, as its user, on its read-only disk."""
    flags = "--phases prefill,stock,stream-tmpfs --prompts 8 --tokens 64 --batched-tokens 256 --shard-tokens 256"
    told = checkout.run("make", "bench-extract", f"ARGS={flags}").stdout
    rows = [line.split() for line in told.splitlines() if line.startswith(("prefill ", "stock ", "stream-tmpfs "))]
    assert [row[0] for row in rows] == ["prefill", "stream-tmpfs", "stock"]
    assert all(float(row[1].replace(",", "")) > 0 for row in rows)


def test_forecast_of_kimi_without_network_or_model(checkout):
    """Its shapes are in the image. Whether it fits is this machine's matter."""
    told = checkout.run("make", "forecast", "CONFIG=configs/kimi-k2.5.toml", check=False).stdout
    assert "hidden states      6,881.9 GB in bfloat16" in told
    assert "memory of a GPU in GiB (8 x 95.5)" in told


def test_a_step_that_fails_fails_the_command(checkout, trained):
    """Each with the exit code of the step itself, where the command can pass it on."""
    wrong = {"AERIE_CONFIG": "configs/wrong.toml"}
    text = (checkout.folder / "configs" / "few.toml").read_text()
    (checkout.folder / "configs" / "wrong.toml").write_text(
        text.replace("data/few", "data/none").replace("few", "wrong")
    )
    done = checkout.step("prepare", check=False, **wrong)
    assert done.returncode == 4
    assert "data/none.jsonl" in done.stdout
    done = checkout.compose("up", "train", check=False, **wrong)
    assert done.returncode != 0
    assert 'service "prepare" didn\'t complete successfully: exit 4' in done.stdout
    done = checkout.run("make", "train", check=False, **wrong)
    assert done.returncode == 2
    assert "prepare] Error 4" in done.stdout


def test_a_training_that_fails_fails_the_command(checkout, trained):
    """Compose ends with 0 whatever the last service does; so the training comes before the last one."""
    other = {"AERIE_CONFIG": "configs/other.toml"}
    text = (checkout.folder / "configs" / "few.toml").read_text()
    (checkout.folder / "configs" / "other.toml").write_text(text.replace("epochs = 1", "epochs = 2"))
    done = checkout.compose("up", "--attach-dependencies", "train", check=False, **other)
    assert done.returncode != 0
    assert "epochs" in done.stdout
    assert 'service "training" didn\'t complete successfully: exit 3' in done.stdout
    assert checkout.step("train", check=False, **other).returncode == 3


def test_a_mistyped_key_is_a_line(checkout, trained):
    done = checkout.step("train", "--train.epoch", "3", check=False)
    assert done.returncode == 2
    assert "Traceback" not in done.stdout


@pytest.fixture
def many(checkout: Checkout) -> Iterator[dict[str, str]]:
    """A run with enough to extract to be stopped in the middle; what it extracts is removed afterwards."""
    environment = {"AERIE_CONFIG": "configs/many.toml"}
    checkout.step("prepare", **environment)
    yield environment
    for folder in (checkout.folder / "runs" / "many").glob("hidden*"):
        shutil.rmtree(folder)


def test_a_killed_extract_goes_on_where_it_was(checkout, many):
    """And what it ends with is what an undisturbed run makes."""
    hidden = checkout.folder / "runs" / "many" / "hidden"
    name = checkout.compose("run", "--detach", "--no-deps", "extract", **many).stdout.split()[-1]
    wait_for(lambda: len(kept(hidden)) >= 3)
    subprocess.run(["docker", "kill", "--signal", "KILL", name], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["docker", "wait", name], check=True, stdout=subprocess.DEVNULL)
    subprocess.run(["docker", "rm", name], check=True, stdout=subprocess.DEVNULL)
    assert not (hidden / "manifest.json").exists()
    there = kept(hidden)
    checkout.step("extract", **many)
    assert there.items() <= inodes(hidden).items()
    disturbed = contents(hidden)
    hidden.rename(hidden.with_name("hidden-disturbed"))
    checkout.step("extract", **many)
    assert shards(contents(hidden)) == shards(disturbed)


def shards(files: dict[str, str]) -> dict[str, str]:
    return {name: digest for name, digest in files.items() if name.startswith("shard-")}


def test_a_stopped_step_ends_in_time_and_goes_on(checkout, many):
    hidden = checkout.folder / "runs" / "many" / "hidden"
    name = checkout.compose("run", "--detach", "--no-deps", "extract", **many).stdout.split()[-1]
    wait_for(lambda: list(hidden.glob("shard-*.safetensors")))
    begun = time.monotonic()
    subprocess.run(["docker", "stop", "--time", "60", name], check=True, stdout=subprocess.DEVNULL)
    assert time.monotonic() - begun < 50
    assert subprocess.check_output(["docker", "wait", name], text=True).strip() == "143"
    subprocess.run(["docker", "rm", name], check=True, stdout=subprocess.DEVNULL)
    assert not (hidden / "manifest.json").exists()


@pytest.fixture
def tokened(checkout: Checkout) -> Iterator[dict[str, str]]:
    path = checkout.folder / "token"
    path.write_text("hf_InTheFile")
    path.chmod(0o644)
    yield {"HF_TOKEN_FILE": str(path)}
    path.unlink()


def test_the_token_reaches_prepare_alone(checkout, tokened):
    code = "import huggingface_hub as h; print('token is', h.get_token())"
    for step, seen in (("prepare", "hf_InTheFile"), ("extract", "None"), ("train", "None")):
        told = checkout.compose(
            "run", "--rm", "--no-deps", "--entrypoint", "python", step, "-c", code, **tokened
        ).stdout
        assert f"token is {seen}" in told


def test_without_a_token_there_is_none(checkout):
    code = "import huggingface_hub as h; print('token is', h.get_token())"
    told = checkout.compose("run", "--rm", "--no-deps", "--entrypoint", "python", "prepare", "-c", code).stdout
    assert "token is None" in told


def test_steps_after_prepare_cannot_leave_the_box(checkout):
    code = "import socket; socket.create_connection(('1.1.1.1', 53), 3)"
    done = checkout.compose(
        "run", "--rm", "--no-deps", "--entrypoint", "python", "extract", "-c", code, check=False
    )  # fmt: skip
    assert done.returncode == 1
    assert "unreachable" in done.stdout or "timed out" in done.stdout


def test_serve_gets_healthy_and_answers(checkout, trained):
    address = free_address()
    try:
        checkout.compose("up", "--detach", "--wait", "--no-deps", "serve", AERIE_SERVE_ADDRESS=address)
        body = '{"model": "few", "prompt": [1, 2, 3], "max_tokens": 4, "temperature": 0}'
        ask = [
            "curl",
            "-fsS",
            "-H",
            "Content-Type: application/json",
            "-d",
            body,
            f"http://{address}/v1/completions",
        ]
        assert '"completion_tokens":4' in subprocess.check_output(ask, text=True)
    finally:
        checkout.compose("rm", "--stop", "--force", "serve")


def test_board_shows_the_runs(checkout, trained):
    address = free_address()
    try:
        checkout.compose("up", "--detach", "board", AERIE_BOARD_ADDRESS=address)
        ask = ["curl", "-fsS", "--retry", "30", "--retry-all-errors", "--retry-delay", "1"]
        url = f"http://{address}/data/runs"
        wait_for(lambda: "few/checkpoints/logs" in subprocess.check_output([*ask, url], text=True))
    finally:
        checkout.compose("rm", "--stop", "--force", "board")


def free_address() -> str:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{free.getsockname()[1]}"


def wait_for(condition, timeout_s: float = 180) -> None:
    end = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.2)


def test_the_users_folders_are_not_made_by_root(checkout):
    """A bind mount whose folder is missing is an error that names it, not an empty folder that root owns."""
    done = checkout.step("vocab", check=False, AERIE_DATA="./elsewhere")
    assert done.returncode != 0
    assert "elsewhere" in done.stdout
    assert not Path(checkout.folder / "elsewhere").exists()
