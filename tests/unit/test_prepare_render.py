"""The loss mask covers the target's own words and nothing else, whatever tokenizer and template."""

import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.prepare.conversations import Conversation
from pipeline.prepare.rejects import Rejection
from pipeline.prepare.render import Rendered, Renderer
from tests.unit.prepare_tokenizers import (
    CHATML,
    CLOSED,
    DEEPSEEK,
    QWEN,
    SPECIAL,
    STRICT,
    TRAILING,
    TWISTED,
    end_id,
    fast_tokenizer,
    slow_tokenizer,
)

warnings.simplefilter("error")

TOKENIZERS = {"fast": fast_tokenizer(), "slow": slow_tokenizer()}


def conversation(*messages: tuple[str, str] | dict, name: str = "c") -> Conversation:
    """Messages as (role, content), u and a for short."""
    roles = {"u": "user", "a": "assistant", "s": "system"}
    full = [m if isinstance(m, dict) else {"role": roles[m[0]], "content": m[1]} for m in messages]
    return Conversation("data.jsonl", 1, name, full, None)


def render(tokenizer, *items) -> list[Rendered | Rejection]:
    return list(Renderer(tokenizer, [end_id(tokenizer)]).samples(items))


def spans(tokenizer, rendered: Rendered) -> list[str]:
    """The texts of the supervised runs of tokens."""
    sample = rendered.sample
    edges = np.flatnonzero(np.diff(np.concatenate([[0], sample.loss_mask_S.view(np.int8), [0]])))
    return [decode(tokenizer, sample.input_ids_S[a:b]) for a, b in edges.reshape(-1, 2)]


def decode(tokenizer, ids) -> str:
    # spaces_between_special_tokens is a slow tokenizer's habit, not part of the text
    extra = {} if tokenizer.is_fast else {"spaces_between_special_tokens": False}
    return tokenizer.decode([int(i) for i in ids], skip_special_tokens=False, **extra)


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_one_turn(kind):
    tokenizer = TOKENIZERS[kind]
    (rendered,) = render(tokenizer, conversation(("u", "Hi"), ("a", "Hello there")))
    assert decode(tokenizer, rendered.sample.input_ids_S) == (
        "<|im_start|>system\nBe kind<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello there<|im_end|>\n"
    )
    assert spans(tokenizer, rendered) == ["Hello there<|im_end|>"]
    assert not rendered.sample.loss_mask_S[-1]  # the template's newline is not the target's
    assert (rendered.sample.sample_id, rendered.sample.conversation_id) == ("c", "c")


def test_several_turns_are_one_sample_where_the_renderings_nest():
    tokenizer = TOKENIZERS["fast"]
    (rendered,) = render(tokenizer, conversation(("s", "S"), ("u", "1"), ("a", "one"), ("u", "2"), ("a", "two")))
    assert spans(tokenizer, rendered) == ["one<|im_end|>", "two<|im_end|>"]
    assert rendered.sample.sample_id == "c"


@pytest.mark.parametrize("make", [fast_tokenizer, slow_tokenizer])
def test_reasoning_that_history_drops_is_kept_in_its_own_turn(make):
    tokenizer = make(QWEN)
    first = {"role": "assistant", "content": "one", "reasoning_content": "think 1"}
    second = {"role": "assistant", "content": "two", "reasoning_content": "think 2"}
    samples = render(tokenizer, conversation(("u", "1"), first, ("u", "2"), second))
    assert [s.sample.sample_id for s in samples] == ["c/turn-1", "c/turn-2"]
    assert {s.sample.conversation_id for s in samples} == {"c"}
    assert spans(tokenizer, samples[0]) == ["<think>\nthink 1\n</think>\n\none<|im_end|>"]
    assert spans(tokenizer, samples[1]) == ["<think>\nthink 2\n</think>\n\ntwo<|im_end|>"]
    assert "think 1" not in decode(tokenizer, samples[1].sample.input_ids_S)


def test_without_reasoning_the_same_template_gives_one_sample():
    (rendered,) = render(fast_tokenizer(QWEN), conversation(("u", "1"), ("a", "one"), ("u", "2"), ("a", "two")))
    assert rendered.sample.sample_id == "c"


@pytest.mark.parametrize("make", [fast_tokenizer, slow_tokenizer])
@pytest.mark.parametrize(
    ("template", "prompt_end", "expected"),
    [
        (CLOSED, "<think>", "because</think>yes<|im_end|>"),
        (DEEPSEEK, "<think>\n", "because\n</think>\n\nyes<|im_end|>"),
    ],
)
@pytest.mark.parametrize(
    "answer",
    [
        {"role": "assistant", "content": "yes", "reasoning_content": "because"},
        {"role": "assistant", "content": "<think>because</think>yes"},
    ],
    ids=["field", "inline"],
)
def test_a_generation_prompt_that_opens_the_reasoning(make, template, prompt_end, expected, answer):
    """A finished conversation put through these templates has lost its last reasoning."""
    tokenizer = make(template)
    (rendered,) = render(tokenizer, conversation(("u", "why"), answer))
    assert spans(tokenizer, rendered) == [expected]
    prompt = rendered.sample.input_ids_S[~rendered.sample.loss_mask_S]
    assert decode(tokenizer, prompt).endswith("<|im_start|>assistant\n" + prompt_end)


def test_an_answer_without_reasoning_after_an_opened_one():
    tokenizer = fast_tokenizer(CLOSED)  # the template closes it at once
    (rendered,) = render(tokenizer, conversation(("u", "why"), ("a", "yes")))
    assert spans(tokenizer, rendered) == ["</think>yes<|im_end|>"]
    (rejection,) = render(fast_tokenizer(DEEPSEEK), conversation(("u", "why"), ("a", "yes")))
    assert rejection.code == "no_reasoning"


def test_reasoning_that_a_template_does_not_know_is_counted():
    answer = {"role": "assistant", "content": "yes", "reasoning_content": "because"}
    (rendered,) = render(TOKENIZERS["fast"], conversation(("u", "why"), answer))
    assert rendered.lost_reasoning == 1
    assert spans(TOKENIZERS["fast"], rendered) == ["yes<|im_end|>"]


@pytest.mark.parametrize("start", ["\n", "\n\n", "H"])
def test_a_token_that_spans_the_border(start):
    """`\\n` ends the generation prompt and `\\n\\n` is one token: the prompt's ids are no prefix of the whole's."""
    tokenizer = TOKENIZERS["fast"]
    item = conversation(("u", "x"), ("a", start + "i"))
    (rendered,) = render(tokenizer, item)
    prompt = tokenizer.apply_chat_template(item.messages[:1], add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(item.messages)
    assert whole[: len(prompt)] != prompt
    assert rendered.sample.input_ids_S.tolist()[: len(prompt)] == prompt
    assert spans(tokenizer, rendered) == [start + "i<|im_end|>"]


def test_an_end_that_only_the_last_rendering_has():
    """Phi-3 writes <|endoftext|> after the last turn: still one sample, and not supervised."""
    tokenizer = fast_tokenizer(TRAILING)
    (rendered,) = render(tokenizer, conversation(("u", "1"), ("a", "one"), ("u", "2"), ("a", "two")))
    assert spans(tokenizer, rendered) == ["one<|im_end|>", "two<|im_end|>"]


def test_turns_without_an_end_of_turn_token_are_counted():
    tokenizer = TOKENIZERS["fast"]
    other = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    (rendered,) = Renderer(tokenizer, [other]).samples([conversation(("u", "1"), ("a", "one"))])
    assert rendered.turns_without_end == 1


@pytest.mark.parametrize(
    ("template", "messages", "code"),
    [
        (STRICT, [("u", "1"), ("u", "2"), ("a", "x")], "template"),
        (TWISTED, [("u", "1"), ("a", "x")], "prefix"),
        ("{{ messages[5]['content'].strip() }}", [("u", "1"), ("a", "x")], "template"),
        (CHATML, [("u", "1"), ("a", "x<|im_end|>y")], "end_in_text"),
    ],
)
def test_rejections_name_the_row(template, messages, code):
    good = conversation(("u", "1"), ("a", "one"), name="good")
    items = render(fast_tokenizer(template), conversation(*messages, name="bad"), good)
    assert (items[0].code, items[0].id, items[0].source, items[0].row) == (code, "bad", "data.jsonl", 1)
    if template == STRICT:
        assert "alternate" in items[0].reason
        assert items[1].sample.sample_id == "good"


def test_order_is_kept_and_rejections_pass_through():
    rejection = Rejection("data.jsonl", 7, None, "json", "not JSON")
    items = [conversation(("u", "1"), ("a", str(i)), name=str(i)) for i in range(300)]
    out = render(TOKENIZERS["fast"], *items[:200], rejection, *items[200:])
    assert out[200] == rejection
    assert [r.sample.sample_id for r in out if isinstance(r, Rendered)] == [str(i) for i in range(300)]


def test_prompts_for_regeneration_end_with_the_generation_prompt():
    tokenizer = TOKENIZERS["fast"]
    (prompt,) = Renderer(tokenizer, [end_id(tokenizer)]).prompts([conversation(("u", "1"))])
    assert decode(tokenizer, prompt.input_ids).endswith("<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n")


TEXT = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12).filter(
    lambda text: text.strip() and not any(word in text for word in SPECIAL)
)


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(max_examples=150, deadline=None)
@given(turns=st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=4), system=st.none() | TEXT)
def test_supervised_is_what_the_assistant_says(kind, turns, system):
    """For any texts: the spans are the answers with their ends, in order, and the rest is what was rendered."""
    tokenizer = TOKENIZERS[kind]
    messages = [("s", system)] if system else []
    for question, answer in turns:
        messages += [("u", question), ("a", answer)]
    item = conversation(*messages)
    samples = render(tokenizer, item)
    assert [text for s in samples for text in spans(tokenizer, s)] == [f"{answer}<|im_end|>" for _, answer in turns]
    for rendered in samples:
        first = rendered.sample.loss_mask_S.argmax()
        answers = sum(m["role"] == "assistant" for m in item.messages)
        turn = 0 if len(samples) == 1 else int(rendered.sample.sample_id.rsplit("-", 1)[1]) - 1
        assert answers == len(turns)
        upto = item.messages[: len(item.messages) - 2 * (answers - 1 - turn) - 1]
        prompt = tokenizer.apply_chat_template(upto, add_generation_prompt=True)
        if len(samples) > 1 or len(turns) == 1:
            assert rendered.sample.input_ids_S[:first].tolist() == prompt  # what the target sees when it speaks
