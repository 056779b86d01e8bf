"""Benchmark of `extract`: tokens per second beside what bounds them, all in one run, with random weights.

    python -m benchmarks.extract --model llama-8b --disk /data --json figures.jsonl    # make bench-extract ARGS="..."

Phases, with the same model, prompts and limits:

  prefill       vLLM alone, one token a request: the bound that computing sets
  stream-tmpfs  the step extract with engine `stream`: checks, checksums, fsync, records, manifest; to --tmpfs
  stream-disk   the same to --disk
  disk          writing alone, with fsync, to --disk: the bound that the disk sets
  stock         speculators 0.3.0 with only the API breaks mended, its generate() and a torch.save a sample, to --tmpfs

All but `stock` take turns, on one engine; `stock` has a process of its own. A rate counts from the engine being
ready to the last token, file or record. Progress is on stderr, on stdout a table,
and whether extraction to disk reached its target: the lower of 0.95 of prefill and 0.9 of what the disk sustains.

Exit codes: 0 measured; 1 a phase failed (the others are measured), or --require was not met; 2 wrong usage.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.command import Formatter, count, machine
from benchmarks.figures import Measured, goal_of, medians, table, told
from benchmarks.models import MODELS, Setting, count_parameters, write_model
from benchmarks.phases import GROUPS, in_turns, stock
from benchmarks.stock import BREAKS, FOR_A_CPU, FOR_THE_BENCHMARK, kept_patches, make_variant
from pipeline import engine
from pipeline.errors import ConfigError, UserError

ON_DISK = ("stream-disk", "disk")
FOR_THE_TARGET = ("prefill", *ON_DISK)
ALL = tuple(name for group in GROUPS for name in group)


def main(arguments: list[str] | None = None) -> int:
    """Measure. Returns the exit code."""
    given = sys.argv[1:] if arguments is None else arguments
    try:
        options = _parser().parse_args(given)
        if options.result:
            return _run_group(options)
        wanted = _wanted(options)
        runs, failed = _run_all(options, wanted, given)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    target = goal_of(medians(runs))
    _print_page(options, runs, failed)
    if options.json:
        with options.json.open("a") as file:
            file.write(json.dumps(_facts(options, runs, failed)) + "\n")
    return 1 if failed or (options.require and not (target and target.is_reached)) else 0


def _parser() -> argparse.ArgumentParser:
    kept = "\n".join(f"  {name}\n      {why}" for name, why in (BREAKS | FOR_THE_BENCHMARK).items())
    cpu = "\n".join(f"  {name}\n      on a CPU only: {why}" for name, why in FOR_A_CPU.items())
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.extract",
        description=__doc__,
        epilog=f"patches that `stock` keeps:\n{kept}\n{cpu}",
        formatter_class=Formatter,
        allow_abbrev=False,
    )
    models = ", ".join(f"{name} ({count_parameters(config) / 1e9:.3g} billion)" for name, config in MODELS.items())
    add = parser.add_argument
    add("--model", choices=MODELS, default="tiny" if engine.on_cpu() else "llama-8b",
        help=f"shapes of the model, with their parameters: {models}")  # fmt: skip
    add("--prompts", type=count, default=256, metavar="N", help="prompts, random token ids")
    add("--tokens", type=count, default=1024, metavar="N", help="tokens of each prompt")
    add("--batched-tokens", type=count, default=8192, metavar="N", help="tokens of one forward pass")
    add("--batch", type=count, default=8, metavar="N",
        help="prompts of one generate() of `stock`; lowered, and said so, to what fits one forward pass, because stock "
        "loses the rows beyond it")  # fmt: skip
    add("--shard-tokens", type=count, default=8192, metavar="N",
        help="tokens of one shard. The step's own default, 65536, is for long runs: most of a short one's time would "
        "go to the writing of its last shards")  # fmt: skip
    add("--writers", type=count, default=4, metavar="N", help="shards, or files of `disk`, that are written at once")
    add("--tensor-parallel", type=count, default=1, metavar="N", help="GPUs that share the model")
    add("--phases", type=_names, default=None, metavar="A,B",
        help=f"which, of {','.join(ALL)}; default: all, without --disk those that need no disk")  # fmt: skip
    add("--tmpfs", type=Path, default=Path("/dev/shm"), metavar="DIR",
        help="folder in memory, for the states of one phase at a time (llama-8b: 32,768 bytes a token)")  # fmt: skip
    add("--disk", type=Path, metavar="DIR", help="folder on the disk that is measured, with room for the same")
    add("--disk-gb", type=float, default=4.0, metavar="GB",
        help="what `disk` writes at least, in 10^9 bytes; the states' bytes if they are more")  # fmt: skip
    add("--repeat", type=count, default=1, metavar="N", help="runs of each phase; the table has the median")
    add("--json", type=Path, metavar="FILE", help="file to which one line is appended: machine, versions, all runs")
    add("--require", action="store_true", help="exit with 1 unless extraction to disk reached its target")
    add("--model-folder", type=Path, help=argparse.SUPPRESS)
    add("--result", type=Path, help=argparse.SUPPRESS)  # in a child: measure --phases, one JSON a line
    return parser


def _names(text: str) -> list[str]:
    names = text.split(",")
    if unknown := [name for name in names if name not in ALL]:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is no phase; there are {', '.join(ALL)}")
    return [name for name in ALL if name in names]


def _wanted(options: argparse.Namespace) -> list[str]:
    """The phases to run. Raises ConfigError for flags that do not go together."""
    wanted = options.phases or [name for name in ALL if options.disk or name not in ON_DISK]
    if needs := [name for name in wanted if name in ON_DISK and not options.disk]:
        raise ConfigError(f"bench: phase {needs[0]} measures a disk: give a folder on it with --disk")
    if options.require and (lacks := [name for name in FOR_THE_TARGET if name not in wanted]):
        raise ConfigError(f"bench: --require needs phase {lacks[0]} as well{'' if options.disk else ', and --disk'}")
    for name, folder in (("--tmpfs", options.tmpfs), ("--disk", options.disk)):
        if folder and not folder.is_dir():
            raise ConfigError(f"bench: {name} {folder} is not a folder")
    limit = MODELS[options.model]["max_position_embeddings"] - 1
    if options.tokens > limit:
        raise ConfigError(f"bench: {options.model} takes prompts of {limit} tokens at most (--tokens)")
    if "stock" in wanted and options.tokens > options.batched_tokens:
        raise ConfigError(
            "bench: a prompt exceeds --batched-tokens, where stock loses rows. Leave `stock` out of --phases"
        )
    return wanted


def _setting(options: argparse.Namespace) -> Setting:
    return Setting(
        model=options.model,
        prompts=options.prompts,
        tokens=options.tokens,
        batched_tokens=options.batched_tokens,
        shard_tokens=options.shard_tokens,
        writers=options.writers,
        tensor_parallel=options.tensor_parallel,
        dtype="float32" if engine.on_cpu() else "bfloat16",
    )


def _batch(options: argparse.Namespace) -> int:
    return max(1, min(options.batch, options.batched_tokens // options.tokens))


# ---- The parent


def _run_all(options: argparse.Namespace, wanted: list[str], given: list[str]) -> tuple[list[Measured], list[str]]:
    """All runs of all phases, and the names of the phases that failed."""
    runs: list[Measured] = []
    began = time.monotonic()
    if "stock" in wanted and _batch(options) < options.batch:
        _say(f"stock runs {_batch(options)} prompts a batch, not {options.batch}: more exceed --batched-tokens")
    with ExitStack() as folders:

        def inside(place: Path) -> Path:
            return Path(folders.enter_context(tempfile.TemporaryDirectory(prefix="aerie-bench-", dir=place)))

        work = inside(options.tmpfs)
        places = ["--tmpfs", str(work), *(["--disk", str(inside(options.disk))] if options.disk else [])]
        write_model(work / "model", options.model)
        for group in GROUPS:
            names = [name for name in group if name in wanted]
            if names:
                _say(f"{', '.join(names)}: {options.repeat} of each, {time.monotonic() - began:.0f} s after the start")
                runs += _in_child(options, names, [*given, *places, "--phases", ",".join(names)], work)
    return runs, _lacking(wanted, runs, options.repeat)


def _in_child(options: argparse.Namespace, names: list[str], given: list[str], work: Path) -> list[Measured]:
    """Run phases in a process of their own. What it measured before it failed counts; the reason is on stderr then."""
    result, variant = work / "result.jsonl", work / "variant"
    result.write_bytes(b"")
    if "stock" in names:
        try:
            make_variant(variant, kept_patches())
        except UserError as error:
            _say(f"stock FAILED: {error}")
            return []
    own = ["--model-folder", str(work / "model"), "--result", str(result)]
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.extract", *given, *own],
        stdout=sys.stderr,
        env=_environment(options, variant if "stock" in names else None),
        check=False,
    )
    runs = [Measured(**json.loads(line)) for line in result.read_text().splitlines()]
    if lacking := _lacking(names, runs, options.repeat):
        _say(f"{', '.join(lacking)} FAILED, its own error is above (exit code {done.returncode})")
    return runs


def _lacking(names: list[str], runs: list[Measured], rounds: int) -> list[str]:
    """Phases that were not measured in every round."""
    return [name for name in names if sum(run.phase == name for run in runs) < rounds]


def _environment(options: argparse.Namespace, variant: Path | None) -> dict[str, str]:
    """Of a child. Random weights send all tokens to the same experts, which no real model does: vLLM is to draw them
    at random for each token instead."""
    environment = {"OMP_WAIT_POLICY": "passive", **os.environ}  # as the pipeline's steps run, see pipeline.__main__
    if "n_routed_experts" in MODELS[options.model]:
        environment["VLLM_MOE_ROUTING_SIMULATION_STRATEGY"] = "uniform_random"
    if variant:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(variant), os.environ.get("PYTHONPATH")]))
    return environment


def _say(line: str) -> None:
    print(f"bench  {line}", file=sys.stderr, flush=True)


# ---- A child


def _run_group(options: argparse.Namespace) -> int:
    setting, model_folder, names = _setting(options), options.model_folder, options.phases

    def folder(phase: str) -> tempfile.TemporaryDirectory[str]:
        return tempfile.TemporaryDirectory(dir=options.disk if phase in ON_DISK else options.tmpfs)

    if names == ["stock"]:
        runs = stock(options.repeat, folder, model_folder, setting, _batch(options))
    else:
        runs = in_turns(names, options.repeat, folder, model_folder, setting, int(options.disk_gb * 1e9))
    with options.result.open("a") as file:
        for run in runs:
            _say(told(run))
            file.write(json.dumps(asdict(run)) + "\n")
            file.flush()
    return 0


# ---- What is shown


def _print_page(options: argparse.Namespace, runs: list[Measured], failed: list[str]) -> None:
    setting, here, best = _setting(options), machine(), medians(runs)
    parameters = count_parameters(MODELS[setting.model]) / 1e9
    print(
        f"{setting.model}, {parameters:.3g} billion random weights in {setting.dtype}; {setting.prompts:,} prompts of "
        f"{setting.tokens:,} tokens, {setting.batched_tokens:,} a forward pass; {setting.bytes_per_token:,} bytes of "
        f"states a token\n{here['gpu'] or here['cpu']}, {here['vllm']}, torch {here['torch']}, "
        f"{here['date']}\n"
    )
    print(table(best, runs))
    for phase in failed:
        print(f"{phase}  FAILED")
    if target := goal_of(best):
        print(f"\n{target.text()}")


def _facts(options: argparse.Namespace, runs: list[Measured], failed: list[str]) -> dict[str, Any]:
    """All of it, for programs."""
    target = goal_of(medians(runs))
    shown = ("model", "prompts", "tokens", "batched_tokens", "shard_tokens", "writers", "tensor_parallel", "repeat")
    return {
        "benchmark": "extract",
        "machine": machine(),
        "setting": {name: getattr(options, name) for name in shown}
        | {"batch": _batch(options), "dtype": _setting(options).dtype},
        "parameters": count_parameters(MODELS[options.model]),
        "runs": [run.facts() for run in runs],
        "medians": {run.phase: run.facts() for run in medians(runs)},
        "failed": failed,
        "target": {"tokens_per_s": target.tokens_per_s, "is_reached": target.is_reached} if target else None,
    }


if __name__ == "__main__":
    sys.exit(main())
