"""Preflight, API contract: does every call into vLLM fit the builds that it must run on?

    python -m pipeline.preflight.contract [--verbose]

Looks at the patched package's extraction code and at all of the pipeline, and binds each call against the installed
vLLM and against both recorded builds (vllm_api.json). Imports neither vLLM nor torch, needs no GPU and no model, and
takes about a second: a wrong keyword is found here, not after a model has been loaded for eighteen minutes. Lines read

    file:line: callee: what is wrong (builds)

What no signature can say is in protocol.py. Calls that cannot be resolved are counted, and listed with --verbose.
Exit codes: 0 all that was checked fits, 1 something does not.
"""

import argparse
import ast
import difflib
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib import util
from pathlib import Path

from pipeline.preflight import protocol
from pipeline.preflight.call_sites import WORKER, Arguments, Program, Site, SiteFinder, Source, read_sources
from pipeline.preflight.vllm_facts import (
    Build,
    Parameter,
    Signature,
    SourceBuild,
    installed_build,
    parameters_of,
    recorded_builds,
)

PIPELINE = Path(__file__).resolve().parents[1]

PACKAGE = "patched speculators"

FORWARDED = {"vllm.entrypoints.llm:LLM": "vllm.engine.arg_utils:EngineArgs"}
"""Constructors that hand their **kwargs on to another: LLM(**kwargs) makes EngineArgs(**kwargs)."""


@dataclass
class Report:
    """What was found. `problems`: lines with all builds that they hold for. `unresolved`: site, build, reason."""

    problems: list[str] = field(default_factory=list)
    unresolved: list[str] = field(default_factory=list)
    partly: list[str] = field(default_factory=list)
    bound: Counter[str] = field(default_factory=Counter)
    builds: list[str] = field(default_factory=list)
    files: int = 0
    notes: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def summary(self) -> str:
        counts = ", ".join(f"{self.bound[build]} against {build}" for build in [*self.builds, PACKAGE])
        return (
            f"contract: {self.files} files, {len(self.problems)} problems; calls bound: {counts}; "
            f"{len(self.partly)} bound in part (* or **), {len(self.unresolved)} not resolved; {self.seconds:.1f} s"
        )


def check(package: Path | None = None, pipeline: Path = PIPELINE, builds: Sequence[Build] | None = None) -> Report:
    """Check the folder of an installed (or patched elsewhere) speculators, and the pipeline's folder.

    Without `package` it is the one of this environment; without `builds`, the installed vLLM and the recorded ones.
    """
    begun = time.perf_counter()
    report = Report()
    if builds is None:
        installed = installed_build()
        builds = [*([installed] if installed else []), *recorded_builds()]
        if installed is None:
            report.notes.append("vLLM is not installed here: calls are bound against the recorded builds only")
    report.builds = [build.name for build in builds]
    sources = [*_package_sources(package, report), *read_sources(pipeline, "pipeline")]
    report.files = len(sources)
    types = next((build for build in builds if isinstance(build, SourceBuild)), builds[0])
    program = Program.of(sources, types)
    problems: dict[tuple[Path, int, str, str], list[str]] = {}
    for source in sources:
        finder = SiteFinder(source, program)
        finder.visit(source.tree)
        for site in finder.sites:
            if site.kind == "package":
                for problem in _check_package_call(site, program, report):
                    problems[(site.path, site.line, site.callee, problem)] = [PACKAGE]
                continue
            for build in builds:
                for problem in _check_site(site, build, program, report):
                    problems.setdefault((site.path, site.line, site.callee, problem), []).append(build.name)
        for breach in protocol.check(source.tree):
            problems[(source.path, breach.line, breach.callee, breach.problem)] = [build.name for build in builds]
    report.problems = [
        f"{path}:{line}: {callee}: {problem} ({', '.join(names)})"
        for (path, line, callee, problem), names in sorted(problems.items())
    ]
    report.seconds = time.perf_counter() - begun
    return report


def _package_sources(package: Path | None, report: Report) -> list[Source]:
    """The extraction code of speculators: the modules of data_generation that its entry points load."""
    if package is None:
        spec = util.find_spec("speculators")
        if spec is None or not spec.origin:
            report.notes.append("speculators is not installed here: only the pipeline's own calls are checked")
            return []
        package = Path(spec.origin).parent
    folder = package / "data_generation"
    sources = {source.module: source for source in read_sources(folder, "speculators.data_generation")}
    wanted, pending = set(), ["speculators.data_generation", "speculators.data_generation.custom_worker"]
    while pending:
        module = pending.pop()
        if module in sources and module not in wanted:
            wanted.add(module)
            pending += _imported(sources[module])
    return [source for module, source in sources.items() if module in wanted]


def _imported(source: Source) -> list[str]:
    found = []
    package = source.module if source.path.name == "__init__.py" else source.module.rpartition(".")[0]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.ImportFrom):
            found.append(f"{package}.{node.module}" if node.level else node.module or "")
    return found


def _check_site(site: Site, build: Build, program: Program, report: Report) -> list[str]:
    """What is wrong with one use of vLLM on one build; counts what cannot be told."""
    where = f"{site.path}:{site.line}: {site.callee}"
    if site.kind == "unknown":
        _once(report.unresolved, f"{where}: its class or origin is not known")
        return []
    if site.kind == "import":
        try:
            build.find(site.target, site.name)
        except LookupError as error:
            return [str(error)]
        return []
    if site.kind == "attribute":
        if build.member(site.target, site.name) is False:
            return [f"{_short(site.target)} has no {site.name}"]
        return []
    if site.kind == "rpc":
        return _check_rpc(site, build, program, report)
    signature = build.signature(site.target)
    if signature is None:
        owner, _, method = site.target.partition(":")[2].partition(".")
        if method and build.member(f"{site.target.partition(':')[0]}:{owner}", method) is False:
            return [f"{owner} has no {method}"]
        _once(report.unresolved, f"{where}: no signature of {site.target} ({build.name})")
        return []
    assert site.arguments is not None
    return _bind(signature, site.arguments, build.name, where, report, build)


def _check_package_call(site: Site, program: Program, report: Report) -> list[str]:
    """A call of our own into the patched package."""
    function = program.functions.get(site.target) or program.constructor(site.target)
    assert site.arguments is not None
    if function is None:
        return [f"{site.target.partition(':')[0]} has no {_short(site.target)}"]
    given = parameters_of(function)
    parameters = given[1:] if given and given[0].name == "self" else given
    where = f"{site.path}:{site.line}: {site.callee}"
    return _bind(Signature(site.target, parameters), site.arguments, PACKAGE, where, report)


def _check_rpc(site: Site, build: Build, program: Program, report: Report) -> list[str]:
    """A method called by name on every worker: the extension's, or vLLM's own."""
    where = f"{site.path}:{site.line}: {site.callee}"
    assert site.arguments is not None
    own = program.extension_method(site.name)
    if own is not None:
        if build.member(WORKER, site.name) is True:
            return [f"vLLM's Worker has a {site.name} of its own, so the extension is refused"]
        return _bind(Signature(site.name, parameters_of(own)[1:]), site.arguments, build.name, where, report)
    signature = build.signature(f"{WORKER}.{site.name}")
    if signature is None:
        if build.member(WORKER, site.name) is False:
            return [f"neither vLLM's Worker nor a worker extension has {site.name}"]
        _once(report.unresolved, f"{where}: no signature of {WORKER}.{site.name} ({build.name})")
        return []
    return _bind(signature, site.arguments, build.name, where, report, build)


def _bind(
    signature: Signature, passed: Arguments, name: str, where: str, report: Report, build: Build | None = None
) -> list[str]:
    """What Python would say, all of it at once."""
    report.bound[name] += 1
    if passed.open:
        _once(report.partly, f"{where}: passes arguments by * or ** that cannot be told")
    parameters = list(signature.parameters)
    by_name = {p.name: p for p in parameters if p.kind in ("positional", "keyword")}
    positional = [p for p in parameters if p.kind == "positional"]
    problems = []
    if passed.positional > len(positional) and not any(p.kind == "varargs" for p in parameters):
        problems.append(f"takes {len(positional)} positional arguments, {passed.positional} are given")
    taken = {p.name for p in positional[: passed.positional]}
    for name in sorted(passed.certain & taken):
        problems.append(f"argument {name!r} is given twice")
    for name in sorted(passed.certain - set(by_name)):
        accepted = _accepted_beyond(signature, parameters, build)
        if accepted is not None and name not in accepted:
            problems.append(_unknown_keyword(name, [*by_name, *accepted]))
    missing = [p.name for p in by_name.values() if p.required and p.name not in taken | passed.certain | passed.guarded]
    if missing and not passed.open:
        problems.append(f"required argument {', '.join(map(repr, missing))} is missing")
    return problems


def _accepted_beyond(signature: Signature, parameters: list[Parameter], build: Build | None) -> set[str] | None:
    """Keywords that are accepted besides the named ones; None for any."""
    if not any(p.kind == "varkw" for p in parameters):
        return set()
    further = FORWARDED.get(signature.target)
    found = build.signature(further) if build and further else None
    return {p.name for p in found.parameters} if found else None


def _unknown_keyword(name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, 1, cutoff=0.8)
    return f"takes no argument {name!r}" + (f"; is {close[0]!r} meant?" if close else "")


def _short(target: str) -> str:
    return target.rpartition(":")[2]


def _once(lines: list[str], line: str) -> None:
    if line not in lines:
        lines.append(line)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--verbose", action="store_true", help="list what could not be resolved")
    parser.add_argument("--package", type=Path, help="folder of another speculators than the installed one")
    options = parser.parse_args(arguments)
    report = check(options.package)
    for line in report.problems:
        print(line)
    for line in report.notes:
        print(f"note: {line}")
    if options.verbose:
        for line in report.partly + report.unresolved:
            print(f"not checked in full: {line}")
    print(report.summary())
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
