"""Serve the target, with the run's draft or alone, behind an OpenAI API.

    python -m pipeline serve --config configs/NAME.toml
    curl http://127.0.0.1:8000/v1/completions -d '{"model": "NAME", "prompt": "...", "max_tokens": 64}' \\
         -H 'Content-Type: application/json'

Checks first what would stop vLLM only after the model is loaded, then becomes vLLM's server: the same process, so that
signals, exit code and output are vLLM's own. The model's name in requests is the run's, with the draft or without.
Nothing is written to the run. vLLM's and torch's caches go where their variables say (VLLM_CACHE_ROOT,
TORCHINDUCTOR_CACHE_DIR), else to the home folder and the temporary folder.
"""

import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from pipeline import engine
from pipeline.config import Run
from pipeline.errors import ConfigError
from pipeline.store import read_manifest, verify
from pipeline.target import Target

SERVER = "vllm.entrypoints.openai.api_server"


def run(config: Run) -> None:
    """Become vLLM's server; returns only by an error.

    Raises InputError for a missing target, a draft that is not finished and a vLLM without the patches that a draft for
    this target needs, ConfigError for a port that cannot be had and for a draft where vLLM cannot use any.
    """
    section = config.serve
    target = Target(config.target)
    _ = target.config  # a folder without one is no model
    draft = _draft(config, target) if section.draft else None
    _require_port(section.host, section.port)
    engine.quiet_environment()
    os.environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)  # the server's engine has a process of its own, always
    command = [sys.executable, "-m", SERVER, *arguments(config, target, draft)]
    with_draft = f"draft {draft}, {section.num_speculative_tokens} tokens a step" if draft else "no draft"
    print(
        f"serve  http://{section.host}:{section.port}/v1  model {config.name}: {target.folder}, {with_draft}",
        flush=True,
    )
    os.execve(command[0], command, os.environ)


def arguments(config: Run, target: Target, draft: Path | None) -> list[str]:
    """What vLLM's server is told. `serve.arguments` come last: of an option that is there twice, the last one holds."""
    settings, section = config.target, config.serve
    options: dict[str, Any] = {
        "--model": target.folder.resolve(),
        "--served-model-name": config.name,
        "--host": section.host,
        "--port": section.port,
        "--dtype": settings.dtype,
        "--load-format": settings.load_format,
        "--tensor-parallel-size": settings.tensor_parallel_size,
        "--seed": config.seed,
    }
    if not engine.on_cpu():
        options["--gpu-memory-utilization"] = settings.gpu_memory_utilization
    if ops := engine.custom_ops():
        options["--compilation-config"] = json.dumps({"custom_ops": ops})
    if section.max_num_seqs:
        options["--max-num-seqs"] = section.max_num_seqs
    if draft:
        speculative = {
            "method": "eagle3",
            "model": str(draft.resolve()),
            "num_speculative_tokens": section.num_speculative_tokens,
        }
        options["--speculative-config"] = json.dumps(speculative)
    switches = {"--trust-remote-code": target.trust_remote_code, "--enforce-eager": section.enforce_eager}
    return [
        *(str(part) for option in options.items() for part in option),
        *(switch for switch, on in switches.items() if on),
        *section.arguments,
    ]


def _draft(config: Run, target: Target) -> Path:
    if not engine.speculates():
        raise ConfigError(
            f"serve: the installed {engine.version()} cannot decode speculatively here. "
            "Set serve.draft = false to serve the target alone"
        )
    engine.require_eagle3(target, "serve")
    checkpoints = config.folder("checkpoints")
    verify(checkpoints, read_manifest(checkpoints, "train"))
    return checkpoints / "best"


def _require_port(host: str, port: int) -> None:
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise ConfigError(
            f"serve: {host}, port {port}, cannot be had: {error.strerror or error}. Set serve.host, serve.port"
        ) from None
