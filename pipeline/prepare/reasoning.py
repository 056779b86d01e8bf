"""Reasoning as a field of its own, for templates that want it so (Kimi-K2.5; Family.reasoning_apart).

Data keep it inside the answer (`<think>because</think>yes`) or in `reasoning_content`. Kimi's template reads the field
alone: reasoning inside the text would be rendered as the answer, after an empty `<think></think>`, in every turn of
the history too. So it is taken apart first. Nothing is stripped: what stands beside the marks is the target's own.

Text that contains one of the target's control tokens is refused. It would be encoded as that token: a question that
quotes `<|im_end|>` would end its turn, `<|media_pad|>` would stand for an image that is not there, and an answer would
teach the draft a token that the target never said.
"""

from collections.abc import Iterable, Iterator
from typing import Any

from pipeline.prepare.rejects import Rejected

THINK_OPEN, THINK_CLOSE = "<think>", "</think>"
"""What DeepSeek, Qwen and Kimi write around reasoning."""

Message = dict[str, Any]


def taken_apart(messages: list[Message], tools: list[Any] | None, control_tokens: Iterable[str]) -> list[Message]:
    """The messages with reasoning in `reasoning_content` alone, and only where there is some.

    An empty one stays where the data say so themselves, by `<think></think>`: there the target did not reason. An empty
    field says nothing, many exports write it always.

    Raises Rejected for text that holds control tokens (of others than the assistant: those that make turns, calls and
    images; `[PAD]` may be asked about), for a stray mark in an answer, an answer without words, a call without its id.
    """
    control = {THINK_OPEN, THINK_CLOSE, *control_tokens}
    structure = {token for token in control if token.startswith("<|")}
    _refuse(structure, _texts(tools), "the declaration of the tools")
    out = []
    for number, message in enumerate(messages, 1):
        if message["role"] != "assistant":
            _refuse(structure, _texts(message), f"message {number}")
            out.append(message)
            continue
        message = _split(message)
        _refuse(control, _texts(message), f"message {number}")
        _check_calls(message, number)
        out.append(message)
    return out


def without_reasoning(messages: list[Message]) -> list[Message]:
    """The messages as the template shows all of them: in a history none keeps its reasoning."""
    return [{key: value for key, value in message.items() if key != "reasoning_content"} for message in messages]


def _split(message: Message) -> Message:
    reasoning = message.get("reasoning_content", "")
    if reasoning.strip():
        return message
    message = {key: value for key, value in message.items() if key != "reasoning_content"}
    start = message["content"].lstrip()
    if not start.startswith(THINK_OPEN) or THINK_CLOSE not in start:
        return message
    reasoning, _, answer = start.removeprefix(THINK_OPEN).partition(THINK_CLOSE)
    return message | {"reasoning_content": reasoning, "content": answer}


def _check_calls(message: Message, number: int) -> None:
    calls = message.get("tool_calls") or []
    if not message["content"].strip() and not calls:
        raise Rejected("empty_turn", f"message {number} has reasoning and no answer")
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("id"), str):
            raise Rejected("tools", f"message {number}: a tool call without an id, which the target writes itself")


def _refuse(tokens: set[str], texts: Iterable[str], where: str) -> None:
    for text in texts:
        if found := sorted(token for token in tokens if token in text):
            raise Rejected("control_in_text", f"{where} contains {', '.join(found)} as text")


def _texts(value: Any) -> Iterator[str]:
    """All strings in a message or a list of tools, keys included: each of them may be rendered."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from (key, *_texts(inner))
    elif isinstance(value, list):
        for inner in value:
            yield from _texts(inner)
