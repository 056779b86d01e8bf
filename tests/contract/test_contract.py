"""The API contract check: it must see every break that would otherwise show after a model has been loaded."""

import ast
import inspect
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline import patching
from pipeline.preflight import contract, protocol
from pipeline.preflight.call_sites import Arguments
from pipeline.preflight.vllm_facts import (
    Parameter,
    RecordedBuild,
    Signature,
    SourceBuild,
    installed_build,
    recorded_builds,
)
from tests.contract.released import PACKAGE, ROOT

NIGHTLY = "0.16.0rc2.dev344+gea5f903f8"
BUILDS = ("0.16.0", NIGHTLY)
GENERATOR, WORKER = "vllm_hidden_states_generator.py", "custom_worker.py"


class Break(NamedTuple):
    """What the check must name when a patch is not there."""

    file: str
    callee: str
    problem: str
    builds: tuple[str, ...] = BUILDS


BREAKS = {
    "tokenizer-trust-remote-code": [Break(GENERATOR, "AutoTokenizer.from_pretrained", "trust_remote_code")],
    "scheduler-config-is-encoder-decoder": [Break(GENERATOR, "SchedulerConfig", "'is_encoder_decoder' is missing")],
    "capture-without-reaching-into-the-model": [
        Break(WORKER, "self.get_input_embeddings", "embed_input_ids"),
        Break(WORKER, "supports_eagle3", "False for Kimi"),
        Break(WORKER, "model.model", "language_model.model"),
    ],
    "kv-cache-config-without-specs": [
        Break(GENERATOR, "get_kv_cache_config_from_groups", "takes no argument 'kv_cache_specs'")
    ],
    "scheduler-block-size": [Break(GENERATOR, "Scheduler", "'block_size' is missing")],
    "request-eos-token-id-on-both-builds": [
        Break(GENERATOR, "Request", "takes no argument 'eos_token_id'", (NIGHTLY,))
    ],
    "execute-model-in-two-phases": [
        Break(GENERATOR, "self.executor.execute_model", "sample_tokens is never called"),
        Break(GENERATOR, "SchedulerConfig", "async_scheduling=False is missing"),
    ],
    "reply-of-one-rank-is-not-a-list": [Break(GENERATOR, "collective_rpc", "do not index it")],
    "prefix-caching-off": [Break(GENERATOR, "CacheConfig", "enable_prefix_caching=False is missing")],
    "spawn-workers": [Break(GENERATOR, "MultiprocExecutor", "VLLM_WORKER_MULTIPROC_METHOD")],
}
"""The API breaks: the first ten patches of the series."""


def found(report: contract.Report, expected: Break) -> bool:
    """Whether a line names file, line, callee, problem and the recorded builds that it fails on, and no others."""
    for line in report.problems:
        match = re.fullmatch(r"(.+):(\d+): (.+?): (.+) \((.+)\)", line)
        assert match, line
        path, number, callee, problem, builds = match.groups()
        recorded = tuple(build for build in builds.split(", ") if build in BUILDS)
        named = Path(path).name == expected.file and callee == expected.callee and expected.problem in problem
        if named and recorded == expected.builds and int(number) > 0:
            return True
    return False


def tree_without(name: str, released_site: Path, folder: Path) -> tuple[Path, list[str]]:
    """The released code with the series but for one patch; later patches that build on it are left out, too."""
    left_out = []
    site = folder / "site"
    shutil.copytree(released_site / PACKAGE / "data_generation", site / PACKAGE / "data_generation")
    for patch in patching.load_patch_set(PACKAGE).patches:
        if patch.path.stem == name:
            continue
        attempt = Path(shutil.copytree(site, folder / "attempt"))
        options = ["-p1", "--fuzz=2", "--forward", "--batch", "--no-backup-if-mismatch", "--reject-file=-"]
        done = subprocess.run(["patch", *options, "-i", patch.path], cwd=attempt, capture_output=True, check=False)
        if done.returncode:
            left_out.append(patch.path.stem)
        else:
            shutil.rmtree(site)
            shutil.copytree(attempt, site)
        shutil.rmtree(attempt)
    return site / PACKAGE, left_out


def test_every_api_patch_is_accounted_for() -> None:
    names = [patch.path.stem for patch in patching.load_patch_set(PACKAGE).patches]
    assert list(BREAKS) == names[: len(BREAKS)]


@pytest.mark.parametrize("name", BREAKS)
def test_a_missing_patch_is_caught(name: str, released_site: Path, tmp_path: Path) -> None:
    package, left_out = tree_without(name, released_site, tmp_path)
    assert name not in left_out
    assert len(left_out) <= (6 if name.startswith("capture") else 3), left_out
    report = check(package)
    for expected in BREAKS[name]:
        assert found(report, expected), "\n".join(report.problems)
    if not left_out:
        callees = {expected.callee for expected in BREAKS[name]} | {"AutoConfig.from_pretrained", "ModelConfig"}
        assert all(any(f": {callee}: " in line for callee in callees) for line in report.problems), report.problems


def test_the_released_package_breaks_in_all_ways(released_site: Path) -> None:
    report = check(released_site / PACKAGE)
    missing = [expected for breaks in BREAKS.values() for expected in breaks if not found(report, expected)]
    assert not missing


def test_the_whole_series_and_our_own_code_fit_every_build(applied_site: Path) -> None:
    report = check(applied_site / PACKAGE)
    assert report.problems == []
    assert all(report.bound[build] >= 25 for build in BUILDS), report.bound
    assert report.bound[contract.PACKAGE] >= 1, "our call of the generator is not seen"


def test_what_cannot_be_resolved_is_counted(applied_site: Path) -> None:
    """A check that skips silently is worth little: the numbers are part of the last line."""
    report = check(applied_site / PACKAGE)
    summary = report.summary()
    assert f"{len(report.unresolved)} not resolved" in summary
    assert f"{len(report.partly)} bound in part" in summary


@pytest.mark.parametrize("callee", ["SamplingParams", "VllmHiddenStatesGenerator"])
def test_a_wrong_keyword_in_our_own_code_is_caught(callee: str, applied_site: Path, tmp_path: Path) -> None:
    pipeline = Path(shutil.copytree(ROOT / "pipeline", tmp_path / "pipeline"))
    planted = []
    for path in pipeline.rglob("*.py"):
        lines = path.read_text().splitlines(keepends=True)
        calls = [node for node in ast.walk(ast.parse("".join(lines))) if isinstance(node, ast.Call)]
        for call in [call for call in calls if ast.unparse(call.func) == callee]:
            row, end = call.end_lineno - 1, call.end_col_offset - 1  # type: ignore[operator]
            before = "".join(lines[call.lineno - 1 : row]) + lines[row][:end]
            comma = "" if before.rstrip().endswith((",", "(")) else ", "
            lines[row] = lines[row][:end] + comma + "no_such=1" + lines[row][end:]
            planted.append((path, call.lineno))
        path.write_text("".join(lines))
    assert planted
    report = check(applied_site / PACKAGE, pipeline)
    for path, line in planted:
        assert any(
            text.startswith(f"{path}:{line}: {callee}: takes no argument 'no_such'") for text in report.problems
        ), report.problems


def write_pipeline(folder: Path, code: str) -> Path:
    (folder / "pipeline").mkdir()
    (folder / "pipeline/step.py").write_text(textwrap.dedent(code))
    return folder / "pipeline"


BUILDS_HERE = [*([build] if (build := installed_build()) else []), *recorded_builds()]
"""Read once: what the installed vLLM's files say stays the same."""


def check(package: Path, pipeline: Path = ROOT / "pipeline") -> contract.Report:
    return contract.check(package, pipeline, BUILDS_HERE)


needs_vllm = pytest.mark.skipif(installed_build() is None, reason="vLLM is not installed")


@needs_vllm
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("from vllm import LLMM", "vllm has no LLMM"),
        ("from vllm.v1.request import Requests", "vllm.v1.request has no Requests"),
        ("from vllm import LLM\nllm = LLM('m', enforce_eagr=True)", "'enforce_eager' meant"),
        ("from vllm import LLM\nllm = LLM('m')\nllm.generate([], sampling_param=None)", "'sampling_params' meant"),
        ("from vllm import LLM\nLLM('m').generat([])", "LLM has no generat"),
        ("from vllm import LLM\ndef f(llm: 'LLM'):\n    llm.generate()", "'prompts' is missing"),
        ("from vllm import LLM\nllm = LLM('m')\nllm.llm_engine.add_request('1')", "'prompt', 'params' is missing"),
        ("import vllm\nvllm.SamplingParams(max_tokns=1)", "'max_tokens' meant"),
        ("from vllm import SamplingParams\ndef f():\n    d = {'x': 1}\n    SamplingParams(**d)", "'x'"),
        ("from vllm import LLM\ndef f():\n    d = {'model': 'm'}\n    d['tpsize'] = 1\n    LLM(**d)", "'tpsize'"),
        ("from vllm import LLM\ndef f(**m):\n    d = {'modle': 'm'}\n    return d | m\nLLM(**f(seed=1))", "'modle'"),
        (
            "from vllm.v1.core.sched.output import SchedulerOutput\n"
            "def f(s: SchedulerOutput):\n    return s.num_tokens",
            "SchedulerOutput has no num_tokens",
        ),
        (
            "from vllm.v1.executor.multiproc_executor import MultiprocExecutor\n"
            "def f(e: MultiprocExecutor):\n    e.collective_rpc('get_kv_cache_spec', args=(1,))",
            "takes 0 positional arguments, 1 are given",
        ),
        (
            "from vllm.v1.executor.multiproc_executor import MultiprocExecutor\n"
            "def f(e: MultiprocExecutor):\n    e.collective_rpc('get_kv_cache_specks')",
            "neither vLLM's Worker nor a worker extension has get_kv_cache_specks",
        ),
    ],
)
def test_wrong_uses_are_found(code: str, said: str, applied_site: Path, tmp_path: Path) -> None:
    report = check(applied_site / PACKAGE, write_pipeline(tmp_path, code))
    assert any(said in line for line in report.problems), (report.problems, report.unresolved)
    assert all("step.py:" in line for line in report.problems)


def test_an_extension_method_that_the_worker_has_is_found(applied_site: Path, tmp_path: Path) -> None:
    """vLLM asserts that an extension hides nothing of its worker, when the worker starts."""
    package = Path(shutil.copytree(applied_site / PACKAGE, tmp_path / PACKAGE))
    for name in (WORKER, GENERATOR):
        path = package / "data_generation" / name
        path.write_text(path.read_text().replace("_reset_capture", "get_kv_cache_spec"))
    report = check(package)
    assert any("has a get_kv_cache_spec of its own" in line for line in report.problems)


def test_without_vllm_the_recorded_builds_remain(
    applied_site: Path, released_site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contract, "installed_build", lambda: None)
    report = contract.check(applied_site / PACKAGE)
    assert report.builds == list(BUILDS)
    assert report.problems == []
    assert any("vLLM is not installed" in note for note in report.notes)
    broken = contract.check(released_site / PACKAGE)
    assert all(found(broken, expected) for breaks in BREAKS.values() for expected in breaks)


def test_the_command_is_quick_and_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, time; begun = time.time(); from pipeline.preflight import contract; code = contract.main([]);"
        "assert not {'torch', 'vllm', 'speculators'} & set(sys.modules); assert time.time() - begun < 10;"
        "sys.exit(code)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"contract: \d+ files, 0 problems; calls bound: \d+ against", done.stdout)


def test_every_rule_gives_its_reason_and_is_used() -> None:
    used = {name for name, value in vars(protocol).items() if callable(value) and value.__annotations__.get("return")}
    rules = {rule.__name__ for rule in protocol.RULES}
    breaches = {n for n in used if vars(protocol)[n].__annotations__["return"] == protocol.Breaches}
    assert breaches == rules
    assert all(len(rule.__doc__ or "") > 60 for rule in protocol.RULES)


@needs_vllm
def test_the_source_parser_agrees_with_the_recorded_facts() -> None:
    """Two ways to the same signatures, where the installed vLLM is the recorded 0.16.0."""
    source, recorded = installed_build(), recorded_builds()[0]
    assert isinstance(source, SourceBuild)
    if not source.name.endswith(" 0.16.0"):
        pytest.skip(f"{source.name} is not the recorded build")
    compared = 0
    for key in recorded._facts:
        target = key.removesuffix(".__init__")
        expected, actual = recorded.signature(target), source.signature(target)
        if expected is None or actual is None:
            continue
        wanted, got = _shape(expected), _shape(actual)
        if "fields" in recorded._facts[key]:  # the record has fields that no constructor takes (init=False)
            wanted = [shape for shape in wanted if shape in got]
        assert got == wanted, target
        compared += 1
    assert compared > 45


def _shape(signature: Signature) -> list[tuple[str, bool]]:
    return [(p.name, p.required) for p in signature.parameters if p.kind in ("positional", "keyword")]


# ---- The binding itself, against Python's own

KINDS = {
    "positional": inspect.Parameter.POSITIONAL_OR_KEYWORD,
    "varargs": inspect.Parameter.VAR_POSITIONAL,
    "keyword": inspect.Parameter.KEYWORD_ONLY,
    "varkw": inspect.Parameter.VAR_KEYWORD,
}


@st.composite
def signatures(draw: st.DrawFn) -> tuple[Parameter, ...]:
    required = [Parameter(f"r{i}", "positional", True) for i in range(draw(st.integers(0, 3)))]
    optional = [Parameter(f"o{i}", "positional", False) for i in range(draw(st.integers(0, 3)))]
    varargs = [Parameter("args", "varargs", False)] if draw(st.booleans()) else []
    keywords = [Parameter(f"k{i}", "keyword", draw(st.booleans())) for i in range(draw(st.integers(0, 2)))]
    varkw = [Parameter("kwargs", "varkw", False)] if draw(st.booleans()) else []
    return (*required, *optional, *varargs, *keywords, *varkw)


@given(
    signatures(),
    st.integers(0, 7),
    st.sets(st.sampled_from(["r0", "r1", "r2", "o0", "o1", "k0", "k1", "x"])),
)
def test_binding_agrees_with_python(parameters: tuple[Parameter, ...], positional: int, keywords: set[str]) -> None:
    def default(p: Parameter):
        return inspect.Parameter.empty if p.required or p.kind.startswith("var") else None

    python = inspect.Signature([inspect.Parameter(p.name, KINDS[p.kind], default=default(p)) for p in parameters])
    try:
        python.bind(*range(positional), **dict.fromkeys(keywords))
        fits = True
    except TypeError:
        fits = False
    signature = Signature("m:f", parameters)
    problems = contract._bind(signature, Arguments(positional, set(keywords)), "build", "here", contract.Report())
    assert (problems == []) == fits, problems


def test_keys_under_a_look_at_the_signature_are_given_only_where_they_fit() -> None:
    """The way to write one call for two builds: the key counts where it is required, and does no harm elsewhere."""
    with_key = Signature("m:f", (Parameter("a", "positional", True), Parameter("key", "positional", True)))
    without_key = Signature("m:f", (Parameter("a", "positional", True),))
    passed = Arguments(certain={"a"}, guarded={"key"})
    for signature in (with_key, without_key):
        assert contract._bind(signature, passed, "build", "here", contract.Report()) == []
    misspelt = Arguments(certain={"a"}, guarded={"kee"})
    assert contract._bind(with_key, misspelt, "build", "here", contract.Report())


def test_recorded_facts_find_a_name_through_the_package_that_hands_it_on() -> None:
    build = recorded_builds()[0]
    assert isinstance(build, RecordedBuild)
    assert build.find("vllm.config", "CacheConfig") == "vllm.config.cache:CacheConfig"
    assert build.find("vllm.config", "NoSuchConfig") is None
