"""Where Python files call into vLLM, and what they pass, read from their syntax trees.

A call belongs to vLLM if its callee was imported from there, or is a method of an object whose class is known: made by
one of vLLM's constructors, annotated (`llm: "LLM"`), returned by a function that is annotated, or an attribute of such
an object. `collective_rpc("name", args=(...))` is a call of a worker's method. What follows from vLLM but cannot be
told is kept as an unknown, so that it can be counted.
"""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pipeline.preflight.vllm_facts import Build

UNKNOWN = "?"
"""The type of something that comes from vLLM, when its class cannot be told."""

WORKER = "vllm.v1.worker.gpu_worker:Worker"
"""The class that a worker extension becomes a base of; the CPU's worker inherits from it."""


@dataclass
class Arguments:
    """What a call passes. `certain`: given whenever the call runs; `guarded`: given only where the callee's signature
    has it; `open`: there may be more, by `*` or `**`, that cannot be told."""

    positional: int = 0
    certain: set[str] = field(default_factory=set)
    guarded: set[str] = field(default_factory=set)
    open: bool = False


@dataclass(frozen=True)
class Site:
    """One use of vLLM: import, call, attribute, rpc or unknown; or a call into the patched `package`."""

    kind: str
    path: Path
    line: int
    callee: str
    target: str
    name: str = ""
    arguments: Arguments | None = None


@dataclass
class Source:
    """A parsed file and its dotted module name."""

    path: Path
    module: str
    tree: ast.Module


def read_sources(root: Path, package: str) -> list[Source]:
    """All Python files below a package's folder."""
    sources = []
    for path in sorted(root.rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        module = ".".join([package, *(part for part in parts if part != "__init__")])
        sources.append(Source(path, module, ast.parse(path.read_text(encoding="utf-8"), str(path))))
    return sources


@dataclass
class Program:
    """What has to be known of all files before one can be walked."""

    types: Build
    functions: dict[str, ast.FunctionDef] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    extensions: dict[str, str] = field(default_factory=dict)
    has_package: bool = False

    @classmethod
    def of(cls, sources: Iterable[Source], types: Build) -> "Program":
        program = cls(types)
        for source in sources:
            program.has_package |= source.module.startswith("speculators.")
            for node in source.tree.body:
                if isinstance(node, ast.FunctionDef):
                    program.functions[f"{source.module}:{node.name}"] = node
                elif isinstance(node, ast.ClassDef):
                    program.classes[f"{source.module}:{node.name}"] = node
        for source in sources:
            for name in _extension_names(source.tree):
                module, _, extension = name.rpartition(".")
                if f"{module}:{extension}" in program.classes:
                    program.extensions[f"{module}:{extension}"] = name
        return program

    def defined(self, qualified: str) -> str:
        """Where a class or function of these files is defined, if a package only hands it on."""
        module, _, name = qualified.partition(":")
        if qualified in self.functions or qualified in self.classes:
            return qualified
        found = [key for key in {**self.classes, **self.functions} if key.endswith(f":{name}")]
        return found[0] if len(found) == 1 and found[0].startswith(module) else qualified

    def constructor(self, qualified: str) -> ast.FunctionDef | None:
        body = self.classes[qualified].body if qualified in self.classes else []
        return next((n for n in body if isinstance(n, ast.FunctionDef) and n.name == "__init__"), None)

    def extension_method(self, name: str) -> ast.FunctionDef | None:
        for extension in self.extensions:
            for node in self.classes[extension].body:
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    return node
        return None


def _extension_names(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.keyword)
            and node.arg == "worker_extension_cls"
            and isinstance(node.value, ast.Constant)
        ):
            yield str(node.value.value)
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                named = isinstance(key, ast.Constant) and key.value == "worker_extension_cls"
                if named and isinstance(value, ast.Constant):
                    yield str(value.value)


class SiteFinder(ast.NodeVisitor):
    """Walks one file. Statements are taken in their order; a name has the type that it was last given."""

    def __init__(self, source: Source, program: Program):
        self._source, self._program = source, program
        self.sites: list[Site] = []
        self._imports: dict[str, str] = {}
        self._vllm: dict[str, str] = {}
        self._locals: list[dict[str, str]] = [{}]
        self._self_types: dict[str, str] = {}
        self._class: ast.ClassDef | None = None
        self._function: ast.FunctionDef | None = None
        self._quiet = False
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node)

    # Imports

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                self._imports[alias.asname or alias.name.split(".")[0]] = alias.name
            return
        module = self._absolute(node)
        for alias in node.names:
            bound = alias.asname or alias.name
            if module.split(".")[0] != "vllm":
                self._imports[bound] = f"{module}:{alias.name}"
                continue
            try:
                self._vllm[bound] = self._program.types.find(module, alias.name) or UNKNOWN
            except LookupError:
                self._vllm[bound] = UNKNOWN
            self._add("import", node, f"from {module} import {alias.name}", module, alias.name)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self._source.module.split(".")
        is_package = self._source.path.name == "__init__.py"
        base = parts[: len(parts) - node.level + is_package]
        return ".".join([*base, node.module] if node.module else base)

    # Scopes

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self._class = self._class, node
        outer_types, self._self_types = self._self_types, {}
        sites, self._quiet = self.sites, True  # first pass: the types of self's attributes
        for statement in node.body:
            self.visit(statement)
        self.sites, self._quiet = sites, False
        for statement in node.body:
            self.visit(statement)
        self._class, self._self_types = outer, outer_types

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        outer, self._function = self._function, node
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        scope = {a.arg: self._annotated(a.annotation) for a in arguments if a.annotation}
        self._locals.append({name: found for name, found in scope.items() if found})
        self.generic_visit(node)
        self._locals.pop()
        self._function = outer

    # Statements that give a name its type

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            self._bind(target, self._type(node.value))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        self.generic_visit(node)
        annotated = self._annotated(node.annotation)
        self._bind(node.target, annotated or (self._type(node.value) if node.value else None))

    def visit_NamedExpr(self, node: ast.NamedExpr) -> None:
        self.generic_visit(node)
        self._bind(node.target, self._type(node.value))

    def _bind(self, target: ast.expr, found: str | None) -> None:
        if isinstance(target, ast.Name):
            self._locals[-1].pop(target.id, None)
            if found:
                self._locals[-1][target.id] = found
        elif isinstance(target, ast.Attribute) and _is_self(target.value) and found:
            self._self_types[target.attr] = found

    # Types

    def _annotated(self, node: ast.expr | None) -> str | None:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node = ast.parse(node.value, mode="eval").body
        if isinstance(node, ast.BinOp):
            node = node.left
        found = self._vllm.get(node.id) if isinstance(node, ast.Name) else None
        return found if found and found != UNKNOWN else None

    def _type(self, node: ast.expr | None) -> str | None:
        """The vLLM class of a value; UNKNOWN if it comes from vLLM; None if it is not vLLM's."""
        if isinstance(node, ast.NamedExpr):
            return self._type(node.value)
        if isinstance(node, ast.Name):
            return next((scope[node.id] for scope in reversed(self._locals) if node.id in scope), None)
        if isinstance(node, ast.BoolOp):
            return next((found for value in node.values if (found := self._type(value))), None)
        if isinstance(node, ast.Call):
            return self._call_type(node)
        if isinstance(node, ast.Attribute):
            if _is_self(node.value):
                return self._self_types.get(node.attr) or self._worker_attribute(node.attr)
            owner = self._type(node.value)
            if owner:
                return (owner != UNKNOWN and self._program.types.member_type(owner, node.attr)) or UNKNOWN
        return None

    def _worker_attribute(self, name: str) -> str | None:
        """An extension's `self` is a worker too: attributes that the extension does not set are the worker's."""
        if self._class is None or f"{self._source.module}:{self._class.name}" not in self._program.extensions:
            return None
        return self._program.types.member_type(WORKER, name)

    def _call_type(self, node: ast.Call) -> str | None:
        target = self._target(node.func)
        if target == UNKNOWN or (target and ":" in target):
            made = None if target == UNKNOWN else self._program.types.signature(target)
            return (made and made.returns) or (UNKNOWN if made is None else None)
        own = self._own_function(node.func)
        return None if own is None else self._returned(own[0], own[1])

    def _returned(self, module: str, function: ast.FunctionDef) -> str | None:
        if module == self._source.module:
            return self._annotated(function.returns)
        annotation = function.returns
        name = annotation.value if isinstance(annotation, ast.Constant) else getattr(annotation, "id", None)
        for candidate in ("vllm", "vllm.sampling_params"):
            try:
                found = self._program.types.find(candidate, str(name)) if name else None
            except LookupError:
                found = None
            if found:
                return found
        return None

    def _own_function(self, node: ast.expr) -> tuple[str, ast.FunctionDef] | None:
        """A function of these files: module and definition."""
        key = ""
        if isinstance(node, ast.Name):
            key = self._imports.get(node.id, f"{self._source.module}:{node.id}")
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if node.value.id == "self" and self._class:
                found = [n for n in self._class.body if isinstance(n, ast.FunctionDef) and n.name == node.attr]
                return (self._source.module, found[0]) if found else None
            key = self._imports.get(node.value.id, "").replace(":", ".") + f":{node.attr}"
        function = self._program.functions.get(key)
        return (key.partition(":")[0], function) if function else None

    # Uses

    def _target(self, node: ast.expr) -> str | None:
        """Qualified name of a callee of vLLM's, UNKNOWN, or None if it is not vLLM's."""
        if isinstance(node, ast.Name):
            return self._vllm.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        if isinstance(node.value, ast.Name):
            module = self._imports.get(node.value.id, "")
            if module.split(".")[0] == "vllm" and ":" not in module:
                try:
                    return self._program.types.find(module, node.attr) or UNKNOWN
                except LookupError:
                    return UNKNOWN
            owner = self._vllm.get(node.value.id)
            if owner:
                return UNKNOWN if owner == UNKNOWN else f"{owner}.{node.attr}"
        owner = self._type(node.value)
        return UNKNOWN if owner == UNKNOWN else owner and f"{owner}.{node.attr}"

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        target = self._target(node.func)
        if target is None:
            self._package_call(node)
            return
        callee = ast.unparse(node.func)
        self._add("unknown" if target == UNKNOWN else "call", node, callee, target, arguments=self._arguments(node))
        if target.endswith(".collective_rpc"):
            self._rpc(node)

    def _package_call(self, node: ast.Call) -> None:
        imported = self._imports.get(node.func.id, "") if isinstance(node.func, ast.Name) else ""
        if imported.startswith("speculators.data_generation") and ":" in imported and self._program.has_package:
            target = self._program.defined(imported)
            self._add("package", node, ast.unparse(node.func), target, arguments=self._arguments(node))

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self.generic_visit(node)
        owner = self._type(node.value)
        if owner and owner != UNKNOWN and isinstance(node.ctx, ast.Load):
            self._add("attribute", node, ast.unparse(node), owner, node.attr)

    def _rpc(self, node: ast.Call) -> None:
        given = {keyword.arg: keyword.value for keyword in node.keywords}
        method = node.args[0] if node.args else given.get("method")
        if not (isinstance(method, ast.Constant) and isinstance(method.value, str)):
            self._add("unknown", node, "collective_rpc of a callable", UNKNOWN)
            return
        passed = Arguments()
        args, kwargs = given.get("args"), given.get("kwargs")
        if isinstance(args, ast.Tuple):
            passed.positional = len(args.elts)
        else:
            passed.open = args is not None
        if isinstance(kwargs, ast.Dict):
            passed.certain = {str(key.value) for key in kwargs.keys if isinstance(key, ast.Constant)}
        elif kwargs is not None:
            passed.open = True
        self._add("rpc", node, f"collective_rpc({method.value!r})", WORKER, method.value, passed)

    def _arguments(self, node: ast.Call) -> Arguments:
        passed = Arguments()
        for argument in node.args:
            if isinstance(argument, ast.Starred):
                passed.open = True
            else:
                passed.positional += 1
        for keyword in node.keywords:
            if keyword.arg:
                passed.certain.add(keyword.arg)
            else:
                self._keys(keyword.value, passed)
        return passed

    def _keys(self, node: ast.expr, passed: Arguments) -> None:
        """Adds the keys of a mapping that is passed by `**`: a literal, a name, `a | b`, or what a function returns."""
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if key is None:
                    self._keys(value, passed)
                elif isinstance(key, ast.Constant):
                    passed.certain.add(str(key.value))
                else:
                    passed.open = True
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
            self._keys(node.left, passed)
            self._keys(node.right, passed)
        elif isinstance(node, ast.Call) and (own := self._own_function(node.func)):
            for keyword in node.keywords:
                if keyword.arg and own[1].args.kwarg:
                    passed.certain.add(keyword.arg)
            _function_keys(own[1], passed)
        elif isinstance(node, ast.Name) and self._function is not None:
            if not _named_keys(node.id, self._function, passed, self._keys):
                passed.open = True
        else:
            passed.open = True

    def _add(
        self, kind: str, node: ast.AST, callee: str, target: str, name: str = "", arguments: Arguments | None = None
    ) -> None:
        if not self._quiet:
            line = getattr(node, "lineno", 0)
            self.sites.append(Site(kind, self._source.path, line, callee, target, name, arguments))


def _is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"


def _function_keys(function: ast.FunctionDef, passed: Arguments) -> None:
    """Keys of the dictionaries that a function returns; those under a look at a signature are guarded."""
    guarded = {key for node in ast.walk(function) if isinstance(node, ast.If) for key in _guarded_keys(node)}
    found = Arguments()

    def keys(node: ast.expr, into: Arguments) -> None:
        if isinstance(node, ast.Dict):
            into.certain |= {str(key.value) for key in node.keys if isinstance(key, ast.Constant)}
        elif isinstance(node, ast.BinOp):
            keys(node.left, into)
            keys(node.right, into)
        elif not (isinstance(node, ast.Name) and _named_keys(node.id, function, into, keys)):
            into.open = True

    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value is not None:
            keys(node.value, found)
    passed.certain |= found.certain - guarded
    passed.guarded |= found.certain & guarded
    passed.open |= found.open


def _guarded_keys(node: ast.If) -> set[str]:
    """`if "x" in inspect.signature(f).parameters:` guards the key "x"."""
    test = node.test
    if isinstance(test, ast.Compare) and isinstance(test.left, ast.Constant) and "signature" in ast.unparse(test):
        return {str(test.left.value)}
    return set()


def _named_keys(name: str, function: ast.FunctionDef, passed: Arguments, keys) -> bool:
    """Keys put into a local dictionary, by its literal or by `name["key"] = ...`. False if it is none."""
    found = False
    for node in ast.walk(function):
        targets = node.targets if isinstance(node, ast.Assign) else []
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            targets = [node.target]
        for target in targets:
            if isinstance(target, ast.Name) and target.id == name:
                value = node.value  # type: ignore[union-attr]
                if isinstance(value, ast.Name) and value.id == name:
                    continue
                keys(value, passed)
                found = True
            elif isinstance(target, ast.Subscript) and ast.unparse(target.value) == name:
                passed.certain |= {str(target.slice.value)} if isinstance(target.slice, ast.Constant) else set()
    return found
