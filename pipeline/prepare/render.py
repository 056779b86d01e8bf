"""From a conversation to token ids and a loss mask.

The mask is made of token ids alone. For each assistant turn the chat template renders the conversation twice: up to
the turn, with the generation prompt (what the target sees when it is to speak), and through the turn. The ids of the
first must be the beginning of the ids of the second; the rest is the turn. Supervised is the turn up to and including
its end-of-turn token, not what the template writes after it (a newline, mostly): the target never says that. No regex,
no character offsets, so a slow tokenizer that is code in the model's repository does as well.

Several turns are one sample when each rendering continues the one before. Where the template rewrites history (Qwen3
and Kimi drop earlier reasoning) the target sees another context at each turn, so each turn is a sample of its own.
With Kimi the calls and the answer of one question continue each other, so each question is a sample.

Kimi's finished turn cannot be compared with its prompt at all: once the answer is there, the template drops its
reasoning and that of the calls before it. There the target's words are the reasoning, its closing mark, and what the
template adds for the turn when no message has reasoning (prepare/reasoning.py takes it out of the text first).

Otherwise, two cases in which the ids do not nest can be helped:

- The text nests and the ids do not, since a token spans the border (an answer that begins with a newline, after a
  generation prompt that ends with one). The turn is then tokenised alone and appended to the prompt, as in serving,
  where the prompt's tokens are fixed before the answer begins. Both must decode to the same text.
- The generation prompt opens the reasoning (`<think>`) and the finished rendering lacks it (DeepSeek-R1). The turn is
  then the reasoning, its closing mark, and what the template writes after it.

Anything else is rejected with the code `prefix`.
"""

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import islice, pairwise
from typing import Any

import numpy as np

from pipeline.prepare.conversations import TURN_MARK, Conversation
from pipeline.prepare.reasoning import THINK_CLOSE, THINK_OPEN, taken_apart, without_reasoning
from pipeline.prepare.rejects import Rejected, Rejection
from pipeline.store.samples import Sample
from pipeline.target import Target

BATCH = 256
"""Conversations whose texts are tokenised in one call: a fast tokenizer then uses every core."""

Ids = list[int]


@dataclass(frozen=True)
class Turn:
    """One assistant turn as text: what the target sees, and what it says (to the end of the rendering)."""

    prompt: str
    own: str
    lost_reasoning: bool = False
    number: int = 0
    """From 1, among the conversation's assistant turns."""


@dataclass(frozen=True)
class Rendered:
    """A sample before it is cut to length, and what is to be counted of it."""

    conversation: Conversation
    sample: Sample
    lost_reasoning: int = 0
    turns_without_end: int = 0


@dataclass(frozen=True)
class Prompt:
    """A conversation that the target is to answer."""

    conversation: Conversation
    input_ids: Ids


class Renderer:
    """Renders conversations with a target's tokenizer. `end_ids` end its turns (Target.end_of_turn_ids).

    `arguments` go to the chat template. With `control_tokens` reasoning is kept apart (prepare/reasoning.py), and text
    that contains such a token is refused.
    """

    def __init__(
        self,
        tokenizer: Any,
        end_ids: list[int],
        arguments: dict[str, Any] | None = None,
        control_tokens: Collection[str] = (),
    ):
        self._tokenizer, self._arguments, self._control_tokens = tokenizer, arguments or {}, control_tokens
        self._end_ids = frozenset(end_ids)
        self._end_texts = [str(tokenizer.convert_ids_to_tokens(i)) for i in end_ids]

    @classmethod
    def of(cls, target: Target) -> "Renderer":
        """As the target's family wants it. Raises what its tokenizer and target.thinking raise."""
        control_tokens = target.control_texts if target.family.reasoning_apart else ()
        return cls(target.tokenizer, target.end_of_turn_ids, target.template_arguments, control_tokens)

    def samples(self, items: Iterable[Conversation | Rejection]) -> Iterator[Rendered | Rejection]:
        """The samples of conversations with their answers, in order; rejections pass through."""
        for batch in _batches(items):
            parts = [part for item in batch for part in self._parts(item)]
            turns = [turn for part in parts if not isinstance(part, Rejection) for turn in part[1]]
            ids = iter(self.encode([text for turn in turns for text in (turn.prompt, _whole(turn))]))
            for part in parts:
                if isinstance(part, Rejection):
                    yield part
                    continue
                conversation, rendered = part
                yield from self._assemble(conversation, rendered, [(next(ids), next(ids)) for _ in rendered])

    def prompts(self, items: Iterable[Conversation | Rejection]) -> Iterator[Prompt | Rejection]:
        """The prompts of conversations that are to be answered, in order; rejections pass through."""
        for batch in _batches(items):
            texts = [self._try(self._prompt, item) for item in batch]
            ids = iter(self.encode([text for text in texts if isinstance(text, str)]))
            for item, text in zip(batch, texts, strict=True):
                if isinstance(text, Rejection):
                    yield text
                else:
                    assert isinstance(item, Conversation)
                    yield Prompt(item, next(ids))

    def encode(self, texts: list[str]) -> list[Ids]:
        """Token ids of rendered texts: special tokens in the text count as such, none is added."""
        return self._tokenizer(texts, add_special_tokens=False)["input_ids"] if texts else []

    def _try(self, function: Any, item: Conversation | Rejection) -> Any:
        if isinstance(item, Rejection):
            return item
        try:
            return function(item)
        except Rejected as why:
            return item.rejection(why)

    def _render(self, conversation: Conversation, count: int, generation_prompt: bool, last: Any = None) -> str:
        """The text of the first `count` messages; `last` stands in for the last of them."""
        from jinja2 import TemplateError

        messages = conversation.messages[:count]
        if last is not None:
            messages = [*messages[:-1], last]
        try:
            return self._tokenizer.apply_chat_template(
                messages,
                tools=conversation.tools,
                tokenize=False,
                add_generation_prompt=generation_prompt,
                **self._arguments,
            )
        except (TemplateError, TypeError, ValueError, LookupError, AttributeError) as error:
            raise Rejected("template", f"the chat template refuses it: {error or type(error).__name__}") from None

    def _prompt(self, conversation: Conversation) -> str:
        if self._control_tokens:
            conversation = self._apart(conversation)
        return self._render(conversation, len(conversation.messages), True)

    def _parts(self, item: Conversation | Rejection) -> list[Rejection | tuple[Conversation, list[Turn]]]:
        """A conversation with its turns, after the turns that are rejected alone; or what was rejected as a whole."""
        if isinstance(item, Rejection):
            return [item]
        try:
            turns = self._turns_apart(item) if self._control_tokens else self._turns(item)
        except Rejected as why:
            return [item.rejection(why)]
        good = [turn for turn in turns if isinstance(turn, Turn)]
        bad = [turn for turn in turns if isinstance(turn, Rejection)]
        return [*bad, *([(item, good)] if good else [])]

    def _turns(self, conversation: Conversation) -> list[Turn]:
        numbers = _assistant_turns(conversation)
        return [replace(self._turn(conversation, n), number=k) for k, n in enumerate(numbers, 1)]

    def _turns_apart(self, conversation: Conversation) -> list[Turn | Rejection]:
        """As `_turns`; a turn without reasoning is rejected alone, since histories often come without theirs."""
        conversation, out = self._apart(conversation), []
        numbers = _assistant_turns(conversation)
        for k, number in enumerate(numbers, 1):
            try:
                out.append(replace(self._turn_apart(conversation, number), number=k))
            except Rejected as why:
                if why.code not in ("no_reasoning", "no_user_turn"):
                    raise
                out.append(conversation.rejection(why, f"{conversation.id}{TURN_MARK}{k}" if numbers[1:] else None))
        return out

    def _apart(self, conversation: Conversation) -> Conversation:
        messages = taken_apart(conversation.messages, conversation.tools, self._control_tokens)
        return replace(conversation, messages=messages)

    def _turn_apart(self, conversation: Conversation, number: int) -> Turn:
        """What the target says after its prompt, in a template that shows reasoning only while it is of use."""
        if not number:
            raise Rejected("no_user_turn", "message 1 is the assistant's: nobody has asked anything yet")
        bare = replace(conversation, messages=without_reasoning(conversation.messages))
        begin, whole = self._render(bare, number, True), self._render(bare, number + 1, False)
        reasoning: str | None = conversation.messages[number].get("reasoning_content")
        opened = begin.endswith(THINK_OPEN)
        if opened and reasoning is None:
            raise Rejected(
                "no_reasoning",
                f"message {number + 1} has no reasoning, the generation prompt opens {THINK_OPEN}. Regenerate, or set "
                "target.thinking = false",
            )
        if opened:
            begin += THINK_CLOSE
        if not whole.startswith(begin):
            raise Rejected("prefix", f"message {number + 1}: its rendering does not begin with the generation prompt")
        own = (f"{reasoning}{THINK_CLOSE}" if opened else "") + whole[len(begin) :]
        return Turn(self._render(conversation, number, True), own, bool(reasoning) and not opened)

    def _turn(self, conversation: Conversation, number: int) -> Turn:
        message = conversation.messages[number]
        for text in self._end_texts:
            if text in message["content"] or text in message.get("reasoning_content", ""):
                raise Rejected("end_in_text", f"message {number + 1} contains {text}")
        prompt = self._render(conversation, number, True)
        opened = prompt.rstrip()
        if opened.endswith(THINK_OPEN):
            message = _split_reasoning(message)
            whole = self._render(conversation, number + 1, False, message)
            return Turn(prompt, _reasoned(prompt, opened.removesuffix(THINK_OPEN), whole, message))
        whole = self._render(conversation, number + 1, False)
        if not whole.startswith(prompt):
            raise Rejected("prefix", f"message {number + 1}: its rendering does not begin with the generation prompt")
        own = whole[len(prompt) :]
        return Turn(prompt, own, message.get("reasoning_content", "").strip() not in own)

    def _assemble(
        self, conversation: Conversation, turns: list[Turn], pairs: list[tuple[Ids, Ids]]
    ) -> Iterator[Rendered | Rejection]:
        """Samples of one conversation from the ids of each turn's (prompt, prompt + turn)."""
        try:
            own = [self._own_ids(turn, *pair) for turn, pair in zip(turns, pairs, strict=True)]
        except Rejected as why:
            yield conversation.rejection(why)
            return
        ends = [self._end(ids) for ids in own]
        prompts = [prompt for prompt, _ in pairs]
        spans = [(len(p), len(p) + (end or len(ids))) for p, ids, end in zip(prompts, own, ends, strict=True)]
        wholes = [prompt + ids for prompt, ids in zip(prompts, own, strict=True)]
        lost = [turn.lost_reasoning for turn in turns]
        without_end = [end is None for end in ends]
        continues = [
            later[:stop] == whole[:stop] for later, whole, (_, stop) in zip(prompts[1:], wholes, spans, strict=False)
        ]
        if not all(continues) and not self._control_tokens:
            continues = [False] * len(continues)  # all or nothing: the samples of other families stay as they were
        edges = [0, *(k for k, joined in enumerate(continues, 1) if not joined), len(turns)]
        for first, stop in pairwise(edges):
            name = conversation.id if len(edges) == 2 else f"{conversation.id}{TURN_MARK}{turns[first].number}"
            sample = _sample(name, conversation.id, wholes[stop - 1], spans[first:stop])
            yield Rendered(conversation, sample, sum(lost[first:stop]), sum(without_end[first:stop]))

    def _own_ids(self, turn: Turn, prompt_ids: Ids, whole_ids: Ids) -> Ids:
        if whole_ids[: len(prompt_ids)] == prompt_ids:
            return whole_ids[len(prompt_ids) :]
        own_ids = self.encode([turn.own])[0]
        if self._decode(prompt_ids + own_ids) != self._decode(whole_ids):
            raise Rejected("prefix", "the turn's tokens cannot be told from the prompt's")
        return own_ids

    def _decode(self, ids: Ids) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    def _end(self, own_ids: Ids) -> int | None:
        """Length of a turn through its first end-of-turn token; None where the template writes none."""
        return next((i + 1 for i, token in enumerate(own_ids) if token in self._end_ids), None)


def _split_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Reasoning that data sets keep inside the answer (`<think>...</think>answer`), as a field of its own."""
    content = message["content"].lstrip()
    if "reasoning_content" in message or not content.startswith(THINK_OPEN) or THINK_CLOSE not in content:
        return message
    reasoning, _, answer = content.removeprefix(THINK_OPEN).partition(THINK_CLOSE)
    return {**message, "reasoning_content": reasoning, "content": answer.lstrip()}


def _reasoned(prompt: str, before: str, whole: str, message: dict[str, Any]) -> str:
    """What the target says after a generation prompt that opened the reasoning; `before` is the prompt without that.

    The spacing follows the prompt: DeepSeek-R1 opens with `<think>` and a newline and closes with newlines around
    the mark; where there is no newline, none is written.
    """
    reasoning = message.get("reasoning_content", "")
    if whole.startswith(prompt):
        own = whole[len(prompt) :]
        if not reasoning.strip() or reasoning.strip() in own:
            return own
    if not whole.startswith(before):
        raise Rejected("prefix", "the rendered turn does not begin with the generation prompt, even without <think>")
    if not reasoning.strip():
        raise Rejected("no_reasoning", "the generation prompt opens <think>, the answer has no reasoning. Regenerate")
    tail = whole[len(before) :]
    head, mark, rest = tail.partition(THINK_CLOSE)
    answer = rest if mark and not head.strip().removeprefix(THINK_OPEN).strip() else tail
    if prompt.endswith("\n"):
        return f"{reasoning.strip()}\n{THINK_CLOSE}\n\n{answer.lstrip()}"
    return f"{reasoning}{THINK_CLOSE}{answer}"


def _assistant_turns(conversation: Conversation) -> list[int]:
    return [number for number, message in enumerate(conversation.messages) if message["role"] == "assistant"]


def _whole(turn: Turn) -> str:
    return turn.prompt + turn.own


def _sample(sample_id: str, conversation_id: str, ids: Ids, spans: list[tuple[int, int]]) -> Sample:
    mask = np.zeros(len(ids), dtype=bool)
    for start, stop in spans:
        mask[start:stop] = True
    return Sample(sample_id, conversation_id, np.asarray(ids, dtype=np.int32), mask)


def _batches(items: Iterable[Any]) -> Iterator[list[Any]]:
    iterator = iter(items)
    while batch := list(islice(iterator, BATCH)):
        yield batch
