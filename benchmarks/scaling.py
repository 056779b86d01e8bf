"""Benchmark of `train` itself: a run from disk at Kimi-K2.5's sizes, in one process and in several.

    python -m benchmarks.scaling --folder runs --processes 1 2 --json scaling.jsonl

Writes a target's frozen parts and hidden states, all random, to bench-scaling in --folder, trains on them by
`python -m pipeline train` with each number of processes, and removes them. Each process gets --rows rows a step
whatever their number, so that with one GPU a process, tok/s a GPU over that of one process is how well it scales. tok/s
is over all steps, without compiling and checkpoints; `waits` is the share of the time in which rows were waited for;
`later` counts graphs that were compiled after the first step: none should be. Output rows are frozen, as in
benchmarks.train: so all gradients come at the backward pass's end, where nothing hides their way.

Exit codes: 0 measured; 1 a training failed; 2 wrong usage; 5 no room.
"""

import argparse
import json
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from benchmarks.command import Formatter, count, machine
from benchmarks.load import LAST_LAYER, STORED, write_hidden
from benchmarks.training import EPS, TINY, Setting
from pipeline.errors import UserError
from pipeline.store import Shard, claim, finish, read_manifest, require_space
from pipeline.vocab import FILE as VOCAB_FILE

CONFIG = """
name = "scaling"
runs_dir = "{folder}/runs"
[target]
path = "{folder}/target"
max_length = {longest}
[prepare]
sources = ["none"]
[vocab]
draft_vocab_size = {words}
[train]
tokens_per_row = {tokens}
ttt_steps = {steps}
epochs = {epochs}
validation_share = 0
train_lm_head = false
keep_checkpoints = 1
tracker = "none"
"""


@dataclass(frozen=True)
class Scaled:
    """What came of one number of processes."""

    processes: int
    tokens_per_s: float
    waiting_share: float
    memory_bytes: int
    """Of the fullest GPU, as its driver counts."""
    compiled_again: int


def main(arguments: list[str] | None = None) -> int:
    """Measure. Returns the exit code."""
    options = _parser().parse_args(arguments)
    setting = TINY if options.tiny else Setting(tokens=options.row_tokens)
    folder: Path = options.folder.resolve() / "bench-scaling"
    runs: list[Scaled] = []
    try:
        folder.mkdir(parents=True)  # it is removed at the end: nobody else's
    except OSError as error:
        print(f"bench: --folder: {error}. It must be a place where that can be made", file=sys.stderr)
        return 2
    try:
        _write(folder, setting, options)
        for processes in options.processes:
            if (run := _train(folder, processes, options.rows)) is None:
                return 1
            runs.append(run)
            print(_line(run, runs[0]), flush=True)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    if options.json:
        said = {"benchmark": "scaling", "machine": machine(), "setting": asdict(setting), "rows": options.rows,
                "stored": options.stored, "runs": [asdict(run) for run in runs]}  # fmt: skip
        with options.json.open("a") as file:
            file.write(json.dumps(said) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scaling", description=__doc__, formatter_class=Formatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--folder", type=Path, required=True, metavar="DIR", help="where all of it is written (removed afterwards)")
    add("--processes", type=count, nargs="+", default=[1, 2], metavar="N", help="numbers of processes, in turn")
    add("--rows", type=count, default=1, metavar="N", help="rows of a process in a step")
    add("--row-tokens", type=count, default=8192, metavar="N", help="tokens of a row")
    add("--tokens", type=count, default=131072, metavar="N", help="tokens of all samples; 57,344 bytes each in bf16")
    add("--epochs", type=count, default=3, metavar="N", help="how often they are trained on")
    add("--stored", choices=STORED, default="bf16", help="how the states are stored")
    add("--tiny", action="store_true", help="small sizes, for a machine without a GPU")
    add("--json", type=Path, metavar="FILE", help="file to which one line is appended: machine, sizes, all runs")
    return parser


def _write(folder: Path, setting: Setting, options: argparse.Namespace) -> None:
    """Target, hidden/, vocab/ and the configuration."""
    size = 2 * 2 * setting.vocabulary * setting.hidden
    require_space(folder, size, "scaling", "--folder")
    _write_target(folder / "target", setting)
    run = folder / "runs/scaling"
    write_hidden(
        run / "hidden", options.tokens, 4 * setting.tokens, setting.hidden, STORED[options.stored],
        wanted_by="scaling", vocabulary=setting.vocabulary, longest=setting.longest,
    )  # fmt: skip
    _write_vocab(run / "vocab", setting)
    values = {**asdict(setting), "epochs": options.epochs, "folder": folder}
    (folder / "run.toml").write_text(CONFIG.format(**values))


def _write_target(folder: Path, setting: Setting) -> None:
    folder.mkdir(parents=True)
    config = {
        "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": setting.hidden,
        "intermediate_size": setting.inner, "num_hidden_layers": LAST_LAYER, "num_attention_heads": setting.heads,
        "num_key_value_heads": setting.heads, "head_dim": setting.head_dim, "vocab_size": setting.vocabulary,
        "rms_norm_eps": EPS, "max_position_embeddings": 262144, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tensors = {"model.norm.weight": torch.ones(setting.hidden, dtype=torch.bfloat16)}
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        block = torch.empty(1024, setting.hidden).normal_(0, 0.02).to(torch.bfloat16)
        tensors[name] = block.repeat(-(-setting.vocabulary // 1024), 1)[: setting.vocabulary].contiguous()
    save_file(tensors, folder / "model.safetensors")


def _write_vocab(folder: Path, setting: Setting) -> None:
    """The first words of the target are the draft's."""
    claim(folder, "vocab", {"words": setting.words}, resumes=False)
    d2t_D, t2d_V = torch.zeros(setting.words, dtype=torch.long), torch.arange(setting.vocabulary) < setting.words
    save_file({"d2t": d2t_D, "t2d": t2d_V}, folder / VOCAB_FILE)
    finish(folder, "vocab", {"words": setting.words}, [Shard.describe(folder / VOCAB_FILE, 0, 0)], {})


def _train(folder: Path, processes: int, rows: int) -> Scaled | None:
    """None when it failed; its own error is on stderr then."""
    print(f"bench  {processes} processes", file=sys.stderr, flush=True)
    checkpoints, progress = folder / "runs/scaling/checkpoints", folder / f"progress-{processes}.jsonl"
    own = {"processes": processes, "rows_per_step": rows * processes, "progress_json": progress}
    flags = [part for key, value in own.items() for part in (f"--train.{key}", str(value))]
    command = [sys.executable, "-m", "pipeline", "train", "--config", str(folder / "run.toml"), *flags]
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode:
        return None
    totals = read_manifest(checkpoints, "train").totals
    shutil.rmtree(checkpoints)
    told = [json.loads(line) for line in progress.read_text().splitlines()]
    memory = [gpu["memory_bytes"] for line in told for gpu in line["gpus"]]
    return Scaled(
        processes, totals["tokens_per_second"], told[-1]["waiting_share"], max(memory, default=0),
        totals["compiled_again"],
    )  # fmt: skip


def _line(run: Scaled, first: Scaled) -> str:
    each = run.tokens_per_s / run.processes
    ratio = each / (first.tokens_per_s / first.processes)
    return (
        f"{run.processes:3} processes {run.tokens_per_s:9,.0f} tok/s {each:9,.0f} each ({ratio:.2f})  "
        f"waits {100 * run.waiting_share:3.0f} %  {run.memory_bytes / 2**30:6.1f} GiB  later {run.compiled_again}"
    )


if __name__ == "__main__":
    sys.exit(main())
