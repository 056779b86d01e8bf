"""From rows to conversations: one form for the formats in use, nothing accepted by halves.

`conversations` or `messages`  list of {role|from, content|value}; ShareGPT's role names are understood
`prompt`                       a question without an answer
`turns`                        questions of one dialogue without answers: the first is used, the rest is counted
"""

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from pipeline.prepare.rejects import Rejected, Rejection
from pipeline.prepare.sources import Row

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "model": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
"""Role names of OpenAI, ShareGPT and Gemma files, and what chat templates call them."""

PASSED_ON: dict[str, type | tuple[type, ...]] = {
    "name": str,
    "tool_calls": list,
    "tool_call_id": str,
    "reasoning_content": str,
}
"""Further keys of a message that chat templates read, and their types. Other keys mean nothing to them."""

TURN_MARK = "/turn-"
"""Between a conversation's id and a turn's number in the id of a sample that holds one turn."""


@dataclass(frozen=True)
class Conversation:
    """What is rendered. `unused_turns` counts the turns of the row that are not in `messages`."""

    source: str
    row: int
    id: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    unused_turns: int = 0

    def rejection(self, why: Rejected, sample_id: str | None = None) -> Rejection:
        """The line for rejected.jsonl."""
        return Rejection(self.source, self.row, sample_id or self.id, why.code, why.reason)


def conversations(rows: Iterable[Row], regenerate: bool) -> Iterator[Conversation | Rejection]:
    """Conversations and rejections, in the order of the rows, each conversation once.

    With `regenerate` a conversation ends where the target is to answer: trailing assistant turns are taken off first,
    so that two conversations that differ only there are one. Kept in memory: about 150 bytes a conversation, to know
    duplicates and ids.
    """
    contents: set[bytes] = set()
    ids: set[str] = set()
    for source, row, value in rows:
        try:
            messages, tools, unused = _cut(*_parse(value), regenerate)
            digest = _digest(messages, tools)
            if digest in contents:
                raise Rejected("duplicate", "the same conversation came before")
        except Rejected as why:
            yield Rejection(source, row, _row_id(value), why.code, why.reason)
            continue
        contents.add(digest)
        name = _row_id(value)
        if name is None or name in ids or TURN_MARK in name:
            name = digest.hex()
        ids.add(name)
        yield Conversation(source, row, name, messages, tools, unused)


def _row_id(value: Any) -> str | None:
    """The row's own id where it is a usable one: a number or text."""
    if not isinstance(value, dict):
        return None
    for key in ("id", "question_id"):
        name = value.get(key)
        if isinstance(name, int | str) and not isinstance(name, bool) and _is_unicode(str(name)) and str(name).strip():
            return str(name)
    return None


def _digest(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> bytes:
    try:
        text = json.dumps([messages, tools], sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=str)
        return hashlib.blake2b(text.encode(), digest_size=12).digest()
    except UnicodeEncodeError:
        raise Rejected("encoding", "text with half a surrogate pair") from None


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _parse(value: Any) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None, int]:
    """(messages, tools, unused turns) of a row's value."""
    if isinstance(value, Rejected):
        raise value
    if not isinstance(value, dict):
        raise Rejected("not_object", f"a JSON {type(value).__name__}, not an object")
    for key in ("conversations", "messages"):
        if (messages := value.get(key)) is not None:
            if not isinstance(messages, list) or not messages:
                raise Rejected("no_conversation", f"{key} is not a list of messages")
            return [_message(m, number) for number, m in enumerate(messages, 1)], _tools(value.get("tools")), 0
    if (turns := value.get("turns")) is not None:
        if not isinstance(turns, list) or not turns:
            raise Rejected("no_conversation", "turns is not a list of texts")
        return [{"role": "user", "content": _text(turns[0], 1)}], _tools(value.get("tools")), len(turns) - 1
    if (prompt := value.get("prompt")) is not None:
        if not isinstance(prompt, str):
            raise Rejected("no_conversation", f"prompt is a {type(prompt).__name__}, not text")
        return [{"role": "user", "content": _text(prompt, 1)}], _tools(value.get("tools")), 0
    raise Rejected("no_conversation", f"no conversations, messages, prompt or turns (keys: {', '.join(value)})")


def _message(value: Any, number: int) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise Rejected("message", f"message {number} is a {type(value).__name__}, not an object")
    role = value.get("role", value.get("from"))
    if not isinstance(role, str) or role not in ROLES:
        raise Rejected("role", f"message {number}: unknown role {role!r}")
    message: dict[str, Any] = {"role": ROLES[role]}
    for key, kind in PASSED_ON.items():
        if (extra := value.get(key)) is not None:
            if not isinstance(extra, kind):
                raise Rejected("tools", f"message {number}: {key} is a {type(extra).__name__}")
            message[key] = extra
    if isinstance(reasoning := value.get("reasoning"), str):  # vLLM's server calls it so; elsewhere it is a setting
        message["reasoning_content"] = message.get("reasoning_content") or reasoning
    content = value.get("content", value.get("value"))
    if (message.get("tool_calls") or message["role"] == "tool") and (content is None or content == ""):
        return message | {"content": ""}  # a call needs no words, a tool may return none
    return message | {"content": _text(content, number)}


def _text(content: Any, number: int) -> str:
    """A message's text; a list of text parts is joined."""
    if isinstance(content, list):
        if not all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in content):
            kinds = {str(p.get("type")) if isinstance(p, dict) else type(p).__name__ for p in content}
            others = ", ".join(sorted(kinds - {"text"})) or "a text part without text"
            raise Rejected("content", f"message {number}: only text can be used, this has {others}")
        content = "".join(part["text"] for part in content)
    if content is None:
        raise Rejected("empty_turn", f"message {number} has no content")
    if not isinstance(content, str):
        raise Rejected("content", f"message {number}: content is a {type(content).__name__}, not text")
    if not content.strip():
        raise Rejected("empty_turn", f"message {number} is empty")
    return content


def _tools(value: Any) -> list[dict[str, Any]] | None:
    if isinstance(value, str) and value.strip():  # columns of mixed objects are often stored as JSON text
        try:
            value = json.loads(value)
        except ValueError:
            raise Rejected("tools", "tools is text that is not JSON") from None
    if value is None or value == [] or value == "":
        return None
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise Rejected("tools", "tools is not a list of objects")
    return value


def _cut(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, unused: int, regenerate: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]] | None, int]:
    """End the messages where they are of use: before the answer to come, or after the last one that is there."""
    roles = [message["role"] for message in messages]
    if "user" not in roles:
        raise Rejected("no_user_turn", "no user turn")
    end = len(roles)
    if regenerate:
        while roles[end - 1] == "assistant":
            end -= 1
        if roles[end - 1] == "system":
            raise Rejected("no_user_turn", "nothing to answer: the last turn is the system's")
        return messages[:end], tools, unused
    while end and roles[end - 1] != "assistant":
        end -= 1
    if not end:
        raise Rejected("no_assistant_turn", "no assistant turn, and prepare.regenerate is off")
    return messages[:end], tools, unused + len(roles) - end
