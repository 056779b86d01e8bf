"""The command line: python -m pipeline STEP --config FILE [--section.key VALUE ...]

AERIE_CONFIG in the environment stands for --config.
"""

import argparse
import importlib
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from pydantic import BaseModel

from pipeline.config import Run, load
from pipeline.errors import NO_ROOM, ConfigError, SpaceError, Stopped, UserError

STEPS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    # name: (module with run(config: Run) -> None, one line, sections whose keys the step reads)
    "prepare": ("pipeline.prepare", "conversations to token ids and loss masks", ("target", "prepare")),
    "extract": ("pipeline.extract", "the target's hidden states for every token", ("target", "extract")),
    "merge": ("pipeline.extract.merge", "finish hidden/ when jobs have extracted all its parts", ("target", "extract")),
    "vocab": ("pipeline.vocab", "choose the words that the draft can say", ("target", "vocab")),
    "train": ("pipeline.train", "train the draft", ("target", "train")),
    "evaluate": ("pipeline.evaluate", "acceptance length on held-out prompts", ("target", "evaluate")),
    "preflight": ("pipeline.preflight.step", "what can be known in seconds, before a model is loaded", ("target",)),
    "forecast": (
        "pipeline.forecast",
        "what a run will need: disk, hours, memory; nothing is loaded",
        ("target", "prepare", "extract", "vocab", "train", "forecast"),
    ),
    "report": ("pipeline.report", "what each step has made and what the draft is worth", ()),
    "serve": ("pipeline.serve", "the target with its draft behind an OpenAI API", ("target", "serve")),
    "demo": ("pipeline.demo", "all steps on SmolLM2-135M-Instruct, without a GPU", tuple(Run.model_fields)),
}
DEMO_CONFIG = Path("configs/smollm2-135m.toml")
TOOLS: dict[str, tuple[str, str]] = {
    # without a configuration. name: (module with add_arguments(parser) and run(options) -> exit code, one line)
    "verify": ("pipeline.verify", "whether the files of a run are what was written: checksums, at the disk's speed"),
    "versions": ("pipeline.versions", "what this environment holds: packages, patches; whether it is as built"),
}


def main(arguments: list[str] | None = None) -> int:
    """Run one step. Returns the exit code; see pipeline.errors for their meaning."""
    parser = _parser()
    parsed, unknown = parser.parse_known_args(arguments)
    if unknown:
        parser.exit(
            ConfigError.exit_code,
            f"{parser.prog} {parsed.step}: {' '.join(unknown)}: no such key. {parser.prog} {parsed.step} --help\n",
        )
    options = vars(parsed)
    step, config_file = options.pop("step"), options.pop("config", None)
    if step in TOOLS:
        return _told(step, lambda: importlib.import_module(TOOLS[step][0]).run(parsed))
    try:
        config = load(config_file, _nested(options))
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    return run_step(step, config)


def run_step(step: str, config: Run) -> int:
    """Run a step with its errors told in a line. Returns the exit code.

    OpenMP's waiting threads sleep instead of spinning: as fast on an idle machine, two to three times as fast where
    another process wants the cores. OpenMP reads that when torch is imported, which only the steps do.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    return _told(step, lambda: importlib.import_module(STEPS[step][0]).run(config))


def _told(step: str, run: Callable[[], int | None]) -> int:
    """Run it, with errors told in a line. Returns its exit code, or the error's."""
    try:
        return run() or 0
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    except OSError as error:
        if error.errno not in NO_ROOM:
            raise
        print(f"{step}: no room left on the disk ({error}). Make room, run it again: it goes on", file=sys.stderr)
        return SpaceError.exit_code
    except KeyboardInterrupt as stopped:
        print(f"{step}: stopped{'' if step in TOOLS else '. Run it again: it goes on'}", file=sys.stderr)
        return stopped.exit_code if isinstance(stopped, Stopped) else 130


class _Parser(argparse.ArgumentParser):
    """A wrong call is told in one line, where argparse would print all flags first."""

    def error(self, message: str) -> NoReturn:
        self.exit(ConfigError.exit_code, f"{self.prog}: {message}. {self.prog} --help lists what there is\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m pipeline", description=__doc__)
    steps = parser.add_subparsers(dest="step", metavar="STEP", required=True)
    for name, (_, line, sections) in STEPS.items():
        step = steps.add_parser(name, help=line, description=f"{name}: {line}.", allow_abbrev=False)
        default = DEMO_CONFIG if name == "demo" else os.environ.get("AERIE_CONFIG")
        step.add_argument("--config", type=Path, required=default is None, default=default, metavar="FILE",
                          help=f"TOML file of the run (default: {default or '$AERIE_CONFIG'})")  # fmt: skip
        _add_flags(step, Run, "", sections)
    for name, (module, line) in TOOLS.items():
        tool = steps.add_parser(name, help=line, description=f"{name}: {line}.", allow_abbrev=False)
        importlib.import_module(module).add_arguments(tool)
    return parser


def _add_flags(parser: Any, model: type[BaseModel], prefix: str, sections: tuple[str, ...] | None) -> None:
    """A flag for each key of `model`; its docstring, type and default are the help.

    Flags of sections that the step does not read are taken too, so that one set of flags serves all steps of a run,
    but not listed.
    """
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            listed = sections is not None and name in sections
            group = parser.add_argument_group(name, field.annotation.__doc__) if listed else parser
            _add_flags(group, field.annotation, f"{name}.", sections if listed else None)
            continue
        default = "" if field.is_required() else f" (default: {_shown(field.default)})"
        text = f"{' '.join((field.description or '').split())}{default}".replace("%", "%%")
        help_text = text if sections is not None else argparse.SUPPRESS
        parser.add_argument(
            f"--{prefix}{name}", type=_value, default=argparse.SUPPRESS, metavar="VALUE", help=help_text
        )


def _shown(value: Any) -> str:
    return str(value) if isinstance(value, str | Path) else json.dumps(value)


def _value(text: str) -> Any:
    """A flag's value: JSON where it is (numbers, true, null, lists), else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _nested(flags: dict[str, Any]) -> dict[str, Any]:
    nested: dict[str, Any] = {}
    for key, value in flags.items():
        *section, name = key.split(".")
        place = nested.setdefault(section[0], {}) if section else nested
        place[name] = value
    return nested


if __name__ == "__main__":
    sys.exit(main())
