"""The examples in deploy/ give each job its own part, and all of them all parts; nodes of one job meet at one place."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from pipeline.extract.parts import Part

ROOT = Path(__file__).parents[2]
SAYS_ITS_PART = '#!/bin/sh\necho "$AERIE_EXTRACT__SHARD $AERIE_CONFIG $*"\n'


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout whose Python says which part it was given."""
    shutil.copytree(ROOT / "docker", tmp_path / "docker", ignore=shutil.ignore_patterns("locks", "wheels"))
    for name in (".venv/bin/python", "bin/python"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(SAYS_ITS_PART)
        path.chmod(0o755)
    return tmp_path


def said(command: list[str], folder: Path, **environment: str) -> str:
    path = f"{folder / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(command, cwd=folder, env={"PATH": path, **environment}, capture_output=True, text=True)
    return done.stdout.strip() or done.stderr.strip()


def test_slurm(checkout: Path):
    job = ["bash", str(ROOT / "deploy/slurm/extract.sbatch")]
    run = {"AERIE_CONFIG": "configs/x.toml", "SLURM_ARRAY_TASK_COUNT": "4"}
    assert said(job, checkout, **run, SLURM_ARRAY_TASK_ID="3") == "3/4 configs/x.toml -m pipeline extract"
    alone = {**run, "SLURM_ARRAY_TASK_COUNT": "1", "PARTS": "4"}
    assert said(job, checkout, **alone, SLURM_ARRAY_TASK_ID="3") == "3/4 configs/x.toml -m pipeline extract"
    assert "name the run" in said(job, checkout, SLURM_ARRAY_TASK_ID="1", SLURM_ARRAY_TASK_COUNT="4")


SRUN = """#!/bin/sh
for node in 0 1; do SLURM_NODEID=$node SLURM_GPUS_ON_NODE=8 "$@" || exit; done
"""
SCONTROL = '#!/bin/sh\n[ "$*" = "show hostnames gpu-[3,7]" ] && printf "gpu-3\\ngpu-7\\n"\n'
TORCHRUN = '#!/bin/sh\necho "$NCCL_IB_DISABLE $NCCL_MIN_NCHANNELS $AERIE_CONFIG $*"\n'


def test_slurm_nodes_of_a_training_meet_at_the_first(checkout: Path):
    """By torchrun's own reading of the command line."""
    from torch.distributed.run import config_from_args, parse_args

    for name, text in (("bin/srun", SRUN), ("bin/scontrol", SCONTROL), (".venv/bin/torchrun", TORCHRUN)):
        (checkout / name).write_text(text)
        (checkout / name).chmod(0o755)
    job = ["bash", str(ROOT / "deploy/slurm/train.sbatch")]
    slurm = {"SLURM_JOB_NODELIST": "gpu-[3,7]", "SLURM_NNODES": "2", "SLURM_JOB_ID": "17"}
    assert "name the run" in said(job, checkout, **slurm)
    lines = said(job, checkout, **slurm, AERIE_CONFIG="configs/x.toml").splitlines()
    assert len(lines) == 2
    for number, line in enumerate(lines):
        shared_by_nodes, channels, run, *arguments = line.split()
        assert (shared_by_nodes, channels, run) == ("0", "8", "configs/x.toml")
        config, _, command = config_from_args(parse_args(arguments))
        assert (config.min_nodes, config.max_nodes, config.nproc_per_node) == (2, 2, 8)
        assert (config.rdzv_backend, config.rdzv_endpoint, config.run_id) == ("c10d", "gpu-3:29500", "17")
        assert config.rdzv_configs["is_host"] == str(int(number == 0))
        assert command[-3:] == ["-m", "pipeline", "train"]


def test_kubernetes(checkout: Path):
    spec = yaml.safe_load((ROOT / "deploy/kubernetes/extract.yaml").read_text())["spec"]
    (container,) = spec["template"]["spec"]["containers"]
    environment = {item["name"]: item["value"] for item in container["env"]}
    assert spec["completions"] == int(environment["PARTS"])
    assert spec["template"]["spec"]["terminationGracePeriodSeconds"] > 60
    parts = [
        said(container["command"], checkout, **environment, JOB_COMPLETION_INDEX=str(index)).split()[0]
        for index in range(spec["completions"])
    ]
    assert [Part.of(part) for part in parts] == [Part(number, 4) for number in (1, 2, 3, 4)]
    names = {volume["name"] for volume in spec["template"]["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == names
