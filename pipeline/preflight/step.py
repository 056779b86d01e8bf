"""Preflight: what can be known in seconds, before a model is loaded for eighteen minutes.

    python -m pipeline preflight --config configs/smollm2-135m.toml

One line for each check in CHECKS; imports neither torch nor vLLM, downloads and writes nothing. Exit codes: 0 nothing
failed (warnings are no failure), 4 something did.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator

from pipeline import engine, versions
from pipeline.config import Run
from pipeline.errors import InputError, UserError
from pipeline.preflight import contract, inputs, machine
from pipeline.preflight.finding import Facts, Finding, State


def engine_installed(facts: Facts) -> Finding:
    """vLLM is there, and which."""
    if facts.engine is None:
        return Finding(State.FAIL, "vLLM is not installed in this environment. Run `make setup`, or use the image")
    return Finding(State.OK, facts.engine)


def api_contract(facts: Facts) -> Finding:
    """Every call into vLLM fits the builds that it must run on."""
    report = contract.check()
    bound = f"{report.files} files, {sum(report.bound.values())} calls bound against {', '.join(report.builds)}"
    if report.problems:
        text = f"{len(report.problems)} calls do not fit ({bound}). Mend them, or install the pinned vLLM"
        return Finding(State.FAIL, text, tuple(report.problems))
    return Finding(State.OK, bound, tuple(f"note: {note}" for note in report.notes))


def patches(facts: Facts) -> Finding:
    """Every patch set of patches/ is applied, whole and unaltered."""
    states = {folder.name: versions.patch_state(folder.name) for folder in versions.patched_packages()}
    if not states:
        return Finding(State.FAIL, f"{versions.patching.PATCHES} has no patch sets. Restore it")
    wrong = {
        name: state["reason"] or f"pristine. Run python pipeline/patching.py apply {name}"
        for name, state in states.items()
        if state["state"] != "applied"
    }
    if wrong:
        return Finding(State.FAIL, "; ".join(f"{name}: {reason}" for name, reason in wrong.items()))
    shown = (f"{name}: {len(s['patches'])} applied, set {s['digest'][:12]}" for name, s in states.items())
    return Finding(State.OK, "; ".join(shown))


def draft_engine(facts: Facts) -> Finding:
    """The vLLM that is to decode with the draft can hand it this target's states."""
    target, python = inputs.readable_target(facts.config), facts.config.evaluate.python
    if target is None:
        return Finding(State.NOT_APPLICABLE, "the target is not here yet")
    here: list[str | None] = [None] if facts.engine is not None and engine.speculates() else []
    pythons = [*here, *([python] if python else [])]
    if not pythons:
        return Finding(
            State.NOT_APPLICABLE, f"{facts.engine or 'no vLLM'} does not decode with a draft on this machine"
        )
    for one in pythons:
        if gap := engine.eagle3_gap(target, one):
            return Finding(State.FAIL, gap)
    able = " and ".join(str(one or facts.engine) for one in pythons)
    return Finding(State.OK, f"{able} can serve an EAGLE-3 draft for {target.model_type}")


CHECKS: dict[str, Callable[[Facts], Finding]] = {
    "engine": engine_installed,
    "API contract": api_contract,
    "patches": patches,
    "draft engine": draft_engine,
    "GPUs": machine.gpu_count,
    "GPU memory": machine.gpu_memory,
    "GPU driver": machine.gpu_driver,
    "host memory": machine.host_memory,
    "shared memory": machine.shared_memory,
    "limits": machine.limits,
    "target model": inputs.target_model,
    "disk": inputs.disk,
}


def run(config: Run) -> None:
    """Print a line for each check as it ends. Raises InputError, naming them, when any failed."""
    begun = time.monotonic()
    states: dict[str, State] = {}
    for name, finding in examine(Facts(config)):
        states[name] = finding.state
        print(f"{name:<13}  {finding.state:<14}  {finding.text}", flush=True)
        for line in finding.more:
            print(f"{'':<31}{line}")
    counts = Counter(states.values())
    shown = ", ".join(f"{counts[state]} {state}" for state in State if counts[state])
    print(f"preflight  {len(states)} checks: {shown}; {time.monotonic() - begun:.1f} s")
    if failed := [name for name, state in states.items() if state is State.FAIL]:
        raise InputError(f"preflight: {len(failed)} of {len(states)} checks failed: {', '.join(failed)}")


def examine(facts: Facts) -> Iterator[tuple[str, Finding]]:
    """Do the checks one after the other. A folder or file that a check cannot use fails that check, not the others."""
    for name, check in CHECKS.items():
        try:
            yield name, check(facts)
        except (UserError, OSError) as error:
            yield name, Finding(State.FAIL, " ".join(str(error).split()))
