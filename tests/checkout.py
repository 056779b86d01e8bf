"""A copy of this checkout, in which the Docker tests run commands as a user would."""

import json
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
USER_ID = os.getuid() or 4321
"""Whom the services run as. As root the tests take a number that no user has."""
GROUP_ID = os.getgid() or 4321
VERSION = f"0.0.dev{os.getpid()}"
"""Of all images that are built here; a number of the build follows."""
TOKEN = "hf_TestTokenThatMustNotBeFoundAnywhere"
"""In the environment of every command; the services may not see it, but by a file."""

CONFIG = """
name = "{name}"
[target]
path = "models/tiny"
dtype = "float32"
max_length = 256
[prepare]
sources = ["data/{data}.jsonl"]
regenerate = false
[extract]
max_num_seqs = 4
shard_tokens = 512
[vocab]
draft_vocab_size = 128
[train]
epochs = 1
tokens_per_row = 256
[evaluate]
prompts = ["data/few.jsonl"]
max_new_tokens = 8
"""


@dataclass
class Checkout:
    """A copy of the checkout in which commands are run, as a user would."""

    folder: Path
    environment: dict[str, str] = field(default_factory=dict)

    def run(self, *command: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a command. Its output, errors included, is `stdout`; `check`: a failing one fails the test."""
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=outer_environment() | self.environment | environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=1800,
            check=False,
        )
        if check and done.returncode:
            pytest.fail(f"{' '.join(command)} ended with {done.returncode}:\n{done.stdout[-6000:]}")
        return done

    def compose(self, *arguments: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.run("docker", "compose", *arguments, check=check, **environment)

    def step(self, name: str, *flags: str, check: bool = True, **environment: str) -> subprocess.CompletedProcess[str]:
        return self.compose("run", "--rm", "--no-deps", name, *flags, check=check, **environment)

    def remembered(self, key: str, file: str = ".env") -> str:
        lines = (self.folder / file).read_text().splitlines()
        return next(line.removeprefix(f"{key}=") for line in lines if line.startswith(f"{key}="))


def outer_environment() -> dict[str, str]:
    """Without what would steer make and Compose: the user's own run, image or project."""
    ours = ("AERIE_", "COMPOSE_", "MAKE", "MFLAGS", "GPU_COUNT", "HF_TOKEN")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def build_options() -> list[str]:
    """Of `make build`: the CPU image, on the base that CI has made where the usual one cannot be pulled."""
    given = {name: os.environ.get(f"AERIE_TEST_{name}") for name in ("BASE", "BASE_PYTHON", "CA")}
    return ["VLLM=cpu", *(f"{name}={value}" for name, value in given.items() if value)]


def version_of_ones_own(folder: Path, version: str) -> None:
    """Give a copy a version, and so its image a tag, that no image of the user's has."""
    project = folder / "pyproject.toml"
    project.write_text(re.sub('(?m)^version = ".*"', f'version = "{version}"', project.read_text()))


def copy_checkout(folder: Path) -> Path:
    """The commit that is checked out, with what is changed and not committed on top."""
    subprocess.run(["git", "clone", "--quiet", ROOT, folder], check=True)
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(listing, cwd=ROOT, capture_output=True, check=True)
    for name in filter(None, listed.stdout.decode().split("\0")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).exists():
            shutil.copy2(ROOT / name, folder / name)
        else:
            (folder / name).unlink(missing_ok=True)
    return folder


def conversation(number: int) -> str:
    """A line of a JSONL file."""
    question = {"role": "user", "content": f"What is {number} and {number}?"}
    answer = {"role": "assistant", "content": f"It is {2 * number}, " * 4}
    return json.dumps({"messages": [question, answer]}) + "\n"
