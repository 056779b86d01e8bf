"""What vLLM's callers must do that no signature says: rules over the syntax tree of a file.

Each rule looks at what a file does and gives the lines that break it. A rule's docstring is its reason: it says what
happens without it. "Builds" are the two that vllm_api.json records; these rules hold for both.
"""

import ast
from collections.abc import Iterator
from typing import NamedTuple


class Breach(NamedTuple):
    """One line that breaks a rule."""

    line: int
    callee: str
    problem: str


Breaches = Iterator[Breach]


def check(tree: ast.Module) -> list[Breach]:
    """All breaches of all rules in a file, by line."""
    return sorted(breach for rule in RULES for breach in rule(tree))


def remote_code_is_the_callers_choice(tree: ast.Module) -> Breaches:
    """Kimi's tokenizer and config are code in the model's folder: without trust_remote_code they do not load, and
    with a constant True nobody can refuse to run them. A GGUF file has no code beside it."""
    for call in _calls(tree):
        owner = call.func.value if isinstance(call.func, ast.Attribute) else None
        loads = isinstance(owner, ast.Name) and owner.id.startswith("Auto") and _name(call) == "from_pretrained"
        if (not loads and _name(call) != "ModelConfig") or _keyword(call, "gguf_file") is not None:
            continue
        given = _keyword(call, "trust_remote_code")
        if given is None and not _has_double_star(call):
            yield _breach(call, "trust_remote_code is not passed: Kimi's tokenizer and config do not load")
        elif isinstance(given, ast.Constant) and given.value is True:
            yield _breach(call, "trust_remote_code is always True: the caller cannot refuse remote code")


def execute_model_has_two_phases(tree: ast.Module) -> Breaches:
    """Since vLLM 0.12 an executor's execute_model returns None and waits for sample_tokens; the second batch raises
    otherwise. Inside a worker, the caller has to see to it."""
    called = {_name(call) for call in _calls(tree)}
    if "sample_tokens" in called or _touches_a_model_runner(tree):
        return
    for call in _calls(tree):
        if _name(call) == "execute_model" and isinstance(call.func, ast.Attribute):
            yield _breach(call, "sample_tokens is never called: the next execute_model refuses to run")


def asynchronous_scheduling_is_off(tree: ast.Module) -> Breaches:
    """vLLM turns asynchronous scheduling on by itself, and then needs AsyncScheduler: with Scheduler the workers'
    replies come a step late."""
    called = {_name(call) for call in _calls(tree)}
    for call in _calls(tree):
        if _name(call) == "SchedulerConfig" and "Scheduler" in called and not _is_false(call, "async_scheduling"):
            yield _breach(call, "async_scheduling=False is missing, and requests are scheduled by Scheduler")


def one_ranks_reply_is_not_a_list(tree: ast.Module) -> Breaches:
    """collective_rpc(unique_reply_rank=r) returns the reply of rank r. Indexing it takes a part for the whole."""
    problem = "a reply by unique_reply_rank is no list of replies: do not index it"
    for function in _functions(tree):
        replies = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign) and _asks_one_rank(node.value) and isinstance(node.targets[0], ast.Name):
                replies[node.targets[0].id] = node.value
        for node in ast.walk(function):
            if not isinstance(node, ast.Subscript) or not isinstance(node.slice, ast.Constant):
                continue
            indexed = replies.get(node.value.id) if isinstance(node.value, ast.Name) else node.value
            if isinstance(node.slice.value, int) and isinstance(indexed, ast.Call) and _asks_one_rank(indexed):
                yield Breach(node.lineno, "collective_rpc", problem)


def prefix_caching_is_off(tree: ast.Module) -> Breaches:
    """It is on by default. Requests without a block hasher then fail an assertion from 16 tokens on; with one, cached
    tokens are not computed, so their states cannot be captured: a repeated prompt of 532 tokens gave 4 rows."""
    for call in _calls(tree):
        if _name(call) == "CacheConfig" and not _is_false(call, "enable_prefix_caching"):
            yield _breach(call, "enable_prefix_caching=False is missing: cached tokens are not computed again")


def workers_are_spawned(tree: ast.Module) -> Breaches:
    """vLLM forks its workers by default; CUDA cannot be initialised again in a forked process."""
    said = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
    for call in _calls(tree):
        if _name(call) == "MultiprocExecutor" and not {"VLLM_WORKER_MULTIPROC_METHOD", "spawn"} <= said:
            yield _breach(call, "VLLM_WORKER_MULTIPROC_METHOD is not set to spawn before workers start")


def embeddings_have_their_new_name(tree: ast.Module) -> Breaches:
    """vLLM 0.12 renamed the method of its models; the old name is an AttributeError in the first forward pass."""
    for call in _calls(tree):
        if _name(call) == "get_input_embeddings" and _touches_a_model_runner(tree):
            yield _breach(call, "vLLM's models have embed_input_ids in its place")


def eagle3_support_is_not_asked_for(tree: ast.Module) -> Breaches:
    """supports_eagle3 is False for Kimi-K2.5 and DeepSeek in vLLM 0.16, although a worker can capture their states.
    Whoever serves a draft needs what it promises, and may ask."""
    for call in _calls(tree):
        if _name(call) == "supports_eagle3" and _touches_a_model_runner(tree):
            yield _breach(call, "False for Kimi-K2.5 and DeepSeek: do not demand it")


def decoders_are_found_in_wrapped_models(tree: ast.Module) -> Breaches:
    """Kimi-K2.5 keeps its decoder at language_model.model; `model.model` is an AttributeError there."""
    if not _touches_a_model_runner(tree):
        return
    names = {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    names |= {n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
    if names & {"language_model", "get_language_model"}:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr == "model" and _last_name(node.value) == "model":
            yield Breach(node.lineno, ast.unparse(node), "Kimi-K2.5 keeps its decoder at language_model.model")


RULES = (
    remote_code_is_the_callers_choice,
    execute_model_has_two_phases,
    asynchronous_scheduling_is_off,
    one_ranks_reply_is_not_a_list,
    prefix_caching_is_off,
    workers_are_spawned,
    embeddings_have_their_new_name,
    eagle3_support_is_not_asked_for,
    decoders_are_found_in_wrapped_models,
)


def _calls(tree: ast.AST) -> list[ast.Call]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.Call)]


def _functions(tree: ast.AST) -> list[ast.FunctionDef]:
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]


def _name(call: ast.Call) -> str:
    return _last_name(call.func)


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


def _breach(call: ast.Call, problem: str) -> Breach:
    return Breach(call.lineno, ast.unparse(call.func), problem)


def _keyword(call: ast.Call, name: str) -> ast.expr | None:
    return next((keyword.value for keyword in call.keywords if keyword.arg == name), None)


def _has_double_star(call: ast.Call) -> bool:
    return any(keyword.arg is None for keyword in call.keywords)


def _is_false(call: ast.Call, name: str) -> bool:
    value = _keyword(call, name)
    return isinstance(value, ast.Constant) and value.value is False


def _asks_one_rank(node: ast.expr) -> bool:
    if not isinstance(node, ast.Call) or _name(node) != "collective_rpc":
        return False
    rank = _keyword(node, "unique_reply_rank")
    return rank is not None and not (isinstance(rank, ast.Constant) and rank.value is None)


def _touches_a_model_runner(tree: ast.AST) -> bool:
    """Whether a file runs inside a worker, where models are vLLM's and not transformers'."""
    return any(isinstance(node, ast.Attribute) and node.attr == "model_runner" for node in ast.walk(tree))
