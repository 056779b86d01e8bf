"""What an environment holds: Python packages, patches, Debian packages.

    python -m pipeline versions [--json] [--require NAME=VERSION ...]

Needs no configuration, imports nothing heavy, takes a second or two (every file of the patched packages is hashed). An
image has its inventory in INVENTORY, written when it was built (`versions --json`); there the command prints that file,
and every difference from the environment as it is now. Exit codes: 0 as it should be, 1 a difference or a requirement
that is not met.
"""

import argparse
import json
import os
import platform
import re
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from pipeline import __version__, engine, patching
from pipeline.errors import InputError

INVENTORY = Path("/opt/aerie/versions.json")
HEAD = ("torch", "speculators")
"""Packages that are named at the top, after the engine."""
Inventory = dict[str, Any]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's own flags."""
    parser.add_argument("--json", action="store_true", help="for tools; what an image's build writes to its inventory")
    parser.add_argument("--require", nargs="+", action="extend", default=[], type=_requirement, metavar="NAME=VERSION",
                        help="exit with 1 unless these Python packages have exactly these versions")  # fmt: skip


def run(options: argparse.Namespace) -> int:
    """Print the inventory, then on stderr what is not as recorded or required. Returns the exit code."""
    now = inventory()
    recorded = read_inventory(INVENTORY)
    shown = recorded or now
    _print(json.dumps(shown, indent=1, ensure_ascii=False) if options.json else text(shown))
    problems = [f"{INVENTORY} and this environment differ: {line}" for line in differences(recorded or now, now)]
    problems += unmet(options.require, now["packages"])
    for problem in problems:
        print(f"versions: {problem}", file=sys.stderr)
    return 1 if problems else 0


def inventory() -> Inventory:
    """What is here now, ready for JSON. A broken patch set is a state to report, not an error."""
    try:
        vllm = engine.version()
    except InputError:
        vllm = None
    return {
        "aerie": __version__,
        "revision": os.environ.get("AERIE_REVISION") or None,
        "python": platform.python_version(),
        "os": _os_name(),
        "engine": vllm,
        "packages": _packages(),
        "patch_sets": {folder.name: patch_state(folder.name) for folder in patched_packages()},
        "debian": _debian_packages(),
    }


def patched_packages() -> list[Path]:
    """The folders of patches/, one a package."""
    return sorted(series.parent for series in patching.PATCHES.glob("*/series"))


def patch_state(package: str) -> dict[str, Any]:
    """`state` (applied, pristine or broken), `reason` where broken; digest and names of the set, None where unreadable.

    The digest is that of the patches for the installed version, in the package only when the state is `applied`.
    """
    found: dict[str, Any] = {"state": "broken", "reason": None, "digest": None, "patches": []}
    try:
        patch_set = patching.load_patch_set(package)
        found |= _described(patch_set)
        installed = patching.Installed(package)
        patch_set = patch_set.choose(installed.version)
        found |= _described(patch_set)
        with patching.locked(installed, exclusive=False):
            found["state"] = "applied" if patching.is_applied(installed, patch_set) else "pristine"
    except (patching.PatchingError, OSError) as error:
        found["reason"] = str(error)
    return found


def _described(patch_set: patching.PatchSet) -> dict[str, Any]:
    return {"digest": patch_set.digest, "patches": [patch.name for patch in patch_set.patches]}


def _packages() -> dict[str, str]:
    """Every installed distribution by its normalised name (PyPA's rule); the first on sys.path counts."""
    found: dict[str, str] = {}
    for distribution in metadata.distributions():
        name = distribution.metadata["Name"]
        if name:  # a folder that an interrupted uninstall left has none
            found.setdefault(re.sub(r"[-_.]+", "-", name).lower(), distribution.version)
    return dict(sorted(found.items()))


def _debian_packages() -> dict[str, str] | None:
    """Installed Debian packages; None where there is no dpkg-query."""
    if shutil.which("dpkg-query") is None:
        return None
    command = ["dpkg-query", "--show", "--showformat=${db:Status-Abbrev}\t${binary:Package}\t${Version}\n"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    rows = [line.split("\t") for line in done.stdout.splitlines()]
    return {row[1]: row[2] for row in rows if row[0].startswith("ii")}


def _os_name() -> str:
    try:
        return platform.freedesktop_os_release()["PRETTY_NAME"]
    except (OSError, KeyError):
        return platform.system()


# ---- An image's inventory


def read_inventory(path: Path) -> Inventory | None:
    """The inventory of an image; None where there is none. Raises InputError for a file that is not one.

    An empty file is none yet: `versions --json > FILE` makes it before this program starts.
    """
    if not path.is_file() or not path.stat().st_size:
        return None
    try:
        value = json.loads(path.read_bytes())
        text(value)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"versions: {path} is not an inventory ({error!r}). Build the image again") from None
    return value


def differences(recorded: Inventory, now: Inventory) -> list[str]:
    """One line for each thing that is not as recorded. A revision is compared where this environment names one."""
    lines = [
        f"{name} was {recorded[name]}, is {now[name]}"
        for name in ("aerie", "python", "os", "engine", *(["revision"] if now["revision"] else []))
        if recorded[name] != now[name]
    ]
    for group, label in (("packages", "package"), ("debian", "Debian package")):
        lines += _compared(label, recorded[group] or {}, now[group] or {})
    old, new = ({n: _patches_shown(s) for n, s in value["patch_sets"].items()} for value in (recorded, now))
    return lines + _compared("patch set of", old, new)


def _compared(label: str, old: dict[str, str], new: dict[str, str]) -> list[str]:
    lines = []
    for name in sorted({*old, *new}):
        if name not in new:
            lines.append(f"{label} {name} {old[name]} was removed")
        elif name not in old:
            lines.append(f"{label} {name} {new[name]} was added")
        elif old[name] != new[name]:
            lines.append(f"{label} {name} was {old[name]}, is {new[name]}")
    return lines


# ---- Requirements


def _requirement(value: str) -> tuple[str, str]:
    name, _, version = value.partition("=")
    if not name or not version.strip("="):
        raise argparse.ArgumentTypeError(f"{value!r} is not NAME=VERSION")
    return name, version.lstrip("=")


def unmet(required: list[tuple[str, str]], packages: dict[str, str]) -> list[str]:
    """One line for each required version that is not the installed one. Exact: 2.9.1 is not 2.9.1+cpu."""
    lines = []
    for name, version in required:
        actual = packages.get(re.sub(r"[-_.]+", "-", name).lower())
        if actual != version:
            lines.append(f"{name} {version} is required, {actual or 'none'} is installed")
    return lines


# ---- For a person


def text(value: Inventory) -> str:
    """The inventory as a page: what matters most in a few lines, then all of it."""
    name, _, version = (value["engine"] or "vllm not-installed").partition(" ")
    packages, sets, debian = value["packages"], value["patch_sets"], value["debian"]
    head = [(name, version), *((name, packages.get(name, "not-installed")) for name in HEAD)]
    lines = [f"aerie {value['aerie']} ({value['revision'] or 'revision unknown'})"]
    lines.append(f"  {'python':<14} {value['python']}, {value['os']}")
    for name, version in head:
        package = next((key for key, names in patching.DISTRIBUTIONS.items() if name in names), name)
        patched = f"   patches {_patches_shown(sets[package])}" if package in sets else ""
        lines.append(f"  {name:<14} {version}{patched}")
    for name, state in sets.items():
        lines += ["", f"patches/{name}: {_patches_shown(state)}", *(f"  {patch}" for patch in state["patches"])]
    lines += ["", f"{len(packages)} Python packages", *_columns(packages)]
    if debian is not None:
        lines += ["", f"{len(debian)} Debian packages", *_columns(debian)]
    return "\n".join(lines)


def _patches_shown(state: dict[str, Any]) -> str:
    digest = f"set {state['digest'][:12]}" if state["digest"] else "set unreadable"
    reason = f": {state['reason']}" if state["reason"] else ""
    return f"{state['state']}, {len(state['patches'])} patches, {digest}{reason}"


def _columns(versions: dict[str, str]) -> list[str]:
    width = max(map(len, versions), default=0)
    return [f"  {name:<{width}}  {version}" for name, version in versions.items()]


def _print(page: str) -> None:
    """To a reader that may stop early (`versions | head`): that is no error."""
    try:
        print(page, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
