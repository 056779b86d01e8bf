"""Kimi-K2.5's turns through its own tokenizer and template: the text, the ids, and what of them is supervised.

The ids are put together here from named tokens, so that a template, a tokenizer or a mask that changes is seen.
"""

import json
import socket
from pathlib import Path

import pytest

from pipeline.__main__ import main
from pipeline.config import Run, TargetSection
from pipeline.errors import ConfigError, InputError
from pipeline.evaluate import step
from pipeline.prepare.conversations import Conversation, conversations
from pipeline.prepare.rejects import Rejection
from pipeline.prepare.render import Rendered, Renderer
from pipeline.store.samples import read_samples
from pipeline.target import Target, _hash_code
from tests.kimi.tokenizer import BOS, NOT_SPECIAL, SPECIAL, VOCAB_SIZE, save_kimi_tokenizer

END, USER, ASSISTANT, SYSTEM, MIDDLE = (BOS + i for i in (2, 3, 4, 10, 17))
CALLS, CALLS_END, CALL, ARGUMENTS, CALL_END = (BOS + i for i in (11, 12, 13, 14, 15))
THINK, THINK_END = BOS + 22, BOS + 23
NAMES = {i: name for name, i in (SPECIAL | NOT_SPECIAL).items()}

HEADS = {"user": USER, "assistant": ASSISTANT}
Pieces = list[int | str]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("models") / "small-kimi"
    write_target(path)
    return path


def write_target(path: Path) -> None:
    """A Kimi without weights."""
    save_kimi_tokenizer(path)
    text = {"vocab_size": VOCAB_SIZE, "bos_token_id": BOS, "eos_token_id": BOS + 1}
    (path / "config.json").write_text(json.dumps({"model_type": "kimi_k25", "text_config": text}))


@pytest.fixture(scope="module")
def pin(folder) -> str:
    with pytest.raises(ConfigError, match="is not pinned") as caught:
        _ = Target(TargetSection(path=str(folder), trust_remote_code=True)).trust_remote_code
    return str(caught.value).split('"')[1]


@pytest.fixture(scope="module")
def targets(folder, pin) -> dict[bool | None, Target]:
    """By target.thinking. No connection is made while the model's code is loaded."""
    section = {"path": str(folder), "trust_remote_code": True, "code_sha256": pin}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket.socket, "connect", _no_network)
        found = {thinking: Target(TargetSection(**section, thinking=thinking)) for thinking in (None, True, False)}
        for target in found.values():
            assert not target.tokenizer.is_fast
    return found


def _no_network(*_args):
    raise AssertionError("the tokenizer asked the network")


def enc(text: str) -> list[int]:
    """Ids of plain text by the tokenizer's ranks alone."""
    return enc.model.encode(text, disallowed_special=())  # type: ignore[attr-defined]


@pytest.fixture(autouse=True)
def _ranks(targets):
    enc.model = targets[None].tokenizer.model  # type: ignore[attr-defined]


def turn(role: str, *pieces: int | str, name: str | None = None) -> Pieces:
    return [HEADS.get(role, SYSTEM), name or role, MIDDLE, *pieces, END]


def ids_of(pieces: Pieces) -> list[int]:
    return [i for piece in pieces for i in ([piece] if isinstance(piece, int) else enc(piece))]


def text_of(pieces: Pieces) -> str:
    return "".join(NAMES[piece] if isinstance(piece, int) else piece for piece in pieces)


def rows(*messages: dict, tools: list | None = None) -> list[Conversation | Rejection]:
    """As prepare reads them."""
    value = {"id": "c", "messages": list(messages)} | ({"tools": tools} if tools else {})
    return list(conversations([("data.jsonl", 1, value)], regenerate=False))


def rendered(target: Target, *messages: dict, tools: list | None = None) -> list[Rendered | Rejection]:
    return list(Renderer.of(target).samples(rows(*messages, tools=tools)))


def check(target: Target, found: Rendered | Rejection, *parts: Pieces) -> None:
    """A sample of parts that are in turn given (prompt) and supervised (the target's words)."""
    assert isinstance(found, Rendered), found
    ids, mask = found.sample.input_ids_S.tolist(), found.sample.loss_mask_S.tolist()
    assert target.tokenizer.decode(ids) == "".join(map(text_of, parts))
    assert ids == [i for part in parts for i in ids_of(part)]
    assert mask == [bool(k % 2) for k, part in enumerate(parts) for _ in ids_of(part)]


SAY = {"role": "user", "content": "Hello there.\n\n"}
WHY = {"role": "assistant", "content": "\n\nHi! The sailors.\n", "reasoning_content": " A greeting.\n\n"}
WHY_BY_VLLM = {"role": "assistant", "content": WHY["content"], "reasoning": " A greeting.\n\n", "reasoning_content": ""}
WHY_INLINE = {"role": "assistant", "content": "<think> A greeting.\n\n</think>\n\nHi! The sailors.\n"}
USER_TURN = turn("user", "Hello there.\n\n")
OPEN, SHUT = [ASSISTANT, "assistant", MIDDLE, THINK], [ASSISTANT, "assistant", MIDDLE, THINK, THINK_END]


@pytest.mark.parametrize("answer", [WHY, WHY_BY_VLLM, WHY_INLINE], ids=["field", "vllm's field", "inline"])
@pytest.mark.parametrize("thinking", [None, True])
def test_reasoning_and_answer_are_what_the_target_says(targets, thinking, answer):
    """Neither its spaces nor its line ends are lost; the finished conversation has lost all of it."""
    (found,) = rendered(targets[thinking], SAY, answer)
    own = [" A greeting.\n\n", THINK_END, "\n\nHi! The sailors.\n", END]
    check(targets[thinking], found, [*USER_TURN, *OPEN], own)
    assert found.lost_reasoning == 0


@pytest.mark.parametrize(
    ("answer", "lost"), [(WHY, 1), (WHY_INLINE, 1), ({"role": "assistant", "content": "\n\nHi! The sailors.\n"}, 0)]
)
def test_without_thinking_the_answer_alone_is_supervised(targets, answer, lost):
    """The prompt has closed the reasoning: the target does not say it, nor the mark."""
    (found,) = rendered(targets[False], SAY, answer)
    check(targets[False], found, [*USER_TURN, *SHUT], ["\n\nHi! The sailors.\n", END])
    assert found.lost_reasoning == lost


def test_history_has_empty_marks_and_each_question_is_a_sample(targets):
    """Inline reasoning of an earlier answer would stand in the history as the answer itself."""
    more = ({"role": "user", "content": "Tell me more"}, {"role": "assistant", "content": "<think>More.</think>No."})
    first, second = rendered(targets[None], SAY, WHY_INLINE, *more)
    check(targets[None], first, [*USER_TURN, *OPEN], [" A greeting.\n\n", THINK_END, "\n\nHi! The sailors.\n", END])
    history = [
        *USER_TURN,
        *turn("assistant", THINK, THINK_END, "\n\nHi! The sailors.\n"),
        *turn("user", "Tell me more"),
    ]
    check(targets[None], second, [*history, *OPEN], ["More.", THINK_END, "No.", END])
    assert [found.sample.sample_id for found in (first, second)] == ["c/turn-1", "c/turn-2"]

    (one,) = rendered(targets[False], SAY, WHY_INLINE, *more)  # these do continue each other
    answers = ["\n\nHi! The sailors.\n", END], ["No.", END]
    check(targets[False], one, [*USER_TURN, *SHUT], answers[0], [*turn("user", "Tell me more"), *SHUT], answers[1])
    assert (one.sample.sample_id, one.lost_reasoning) == ("c", 2)


def test_a_system_turn_and_a_name(targets):
    system = {"role": "system", "content": "Be kind."}
    (found,) = rendered(targets[None], system, SAY | {"name": "Ada"}, WHY)
    prompt = [*turn("system", "Be kind."), *turn("user", "Hello there.\n\n", name="Ada"), *OPEN]
    check(targets[None], found, prompt, [" A greeting.\n\n", THINK_END, "\n\nHi! The sailors.\n", END])


def test_text_parts_are_joined(targets):
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "there.\n\n"}]
    answer = [{"type": "text", "text": "<think> A greeting.\n\n</think>"}, {"type": "text", "text": "Hi!"}]
    (found,) = rendered(targets[None], SAY | {"content": parts}, {"role": "assistant", "content": answer})
    check(targets[None], found, [*USER_TURN, *OPEN], [" A greeting.\n\n", THINK_END, "Hi!", END])


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
DECLARED = turn(
    "system", '[{"function":{"name":"look","parameters":{"type":"object"}},"type":"function"}]', name="tool_declare"
)
ASKED = turn("user", "What is the weather?")


def call(name: str, arguments: str | dict) -> dict:
    return {"id": name, "type": "function", "function": {"name": "look", "arguments": arguments}}


def calls_of(*calls: tuple[str, str]) -> Pieces:
    return [CALLS, *(p for name, arguments in calls for p in (CALL, name, ARGUMENTS, arguments, CALL_END)), CALLS_END]


QUESTION = (
    {"role": "user", "content": "What is the weather?"},
    {
        "role": "assistant",
        "content": "<think>I must look.</think>Let me look.",
        "tool_calls": [call("look:0", '{"city": "Ulm"}'), call("look:1", {"city": "Köln"})],
    },
    {"role": "tool", "content": '{"temp": 22}', "tool_call_id": "look:0"},
    {"role": "tool", "content": "rain", "tool_call_id": "look:1", "name": "look"},
    {"role": "assistant", "content": "22 there, rain here.", "reasoning_content": "Two results."},
)
CALLED = ["Let me look.", *calls_of(("look:0", '{"city": "Ulm"}'), ("look:1", '{"city": "Köln"}'))]
RESULTS = [
    *turn("tool", '## Return of look:0\n{"temp": 22}'),
    *turn("tool", "## Return of look:1\nrain", name="look"),
]


def test_calls_results_and_answer_of_one_question_are_one_sample(targets):
    """While a question is worked on the target sees its own earlier reasoning. Once it is answered the template drops
    all of it, so that the finished conversation does not even begin with the prompt of its last turn."""
    (found,) = rendered(targets[None], *QUESTION, tools=TOOLS)
    first = ["I must look.", THINK_END, *CALLED, END]
    last = ["Two results.", THINK_END, "22 there, rain here.", END]
    check(targets[None], found, [*DECLARED, *ASKED, *OPEN], first, [*RESULTS, *OPEN], last)

    (found,) = rendered(targets[False], *QUESTION, tools=TOOLS)
    answers = [*CALLED, END], ["22 there, rain here.", END]
    check(targets[False], found, [*DECLARED, *ASKED, *SHUT], answers[0], [*RESULTS, *SHUT], answers[1])
    assert found.lost_reasoning == 2


def test_calls_of_an_answered_question_are_history(targets):
    """Two questions are two samples, not four: within each, what the target sees goes on."""
    again = [dict(message) for message in QUESTION]
    again[0]["content"] = "And now?"
    first, second = rendered(targets[None], *QUESTION, *again)
    own = ["I must look.", THINK_END, *CALLED, END], ["Two results.", THINK_END, "22 there, rain here.", END]
    check(targets[None], first, [*ASKED, *OPEN], own[0], [*RESULTS, *OPEN], own[1])
    done = [THINK, THINK_END, *CALLED], [THINK, THINK_END, "22 there, rain here."]
    history = [*ASKED, *turn("assistant", *done[0]), *RESULTS, *turn("assistant", *done[1]), *turn("user", "And now?")]
    check(targets[None], second, [*history, *OPEN], own[0], [*RESULTS, *OPEN], own[1])
    assert [found.sample.sample_id for found in (first, second)] == ["c/turn-1", "c/turn-3"]


def test_a_tool_that_returned_nothing(targets):
    (found,) = rendered(targets[None], *QUESTION[:2], *({**m, "content": ""} for m in QUESTION[2:4]), QUESTION[4])
    assert isinstance(found, Rendered)
    (full,) = rendered(targets[None], *QUESTION)
    assert isinstance(full, Rendered)
    assert found.sample.loss_mask_S.sum() == full.sample.loss_mask_S.sum()
    assert len(found.sample.input_ids_S) < len(full.sample.input_ids_S)


@pytest.mark.parametrize("content", ["<think>Look.</think>", None])
def test_a_call_without_words(targets, content):
    made = {"role": "assistant", "content": content, "tool_calls": [call("look:0", "{}")]}
    extra = {"reasoning_content": "Look."} if content is None else {}
    (found,) = rendered(targets[None], QUESTION[0], made | extra)
    check(targets[None], found, [*ASKED, *OPEN], ["Look.", THINK_END, *calls_of(("look:0", "{}")), END])
    (found,) = rendered(targets[False], QUESTION[0], made | extra)
    check(targets[False], found, [*ASKED, *SHUT], [*calls_of(("look:0", "{}")), END])


@pytest.mark.parametrize("empty", [{}, {"reasoning_content": ""}, {"reasoning_content": " \n"}])
def test_an_answer_without_its_reasoning_is_no_answer_of_a_thinking_target(targets, empty):
    """It would teach the draft that `</think>` follows `<think>`. Other turns of the row are used: histories are often
    stored without their reasoning, and the last answer with it."""
    bare = {"role": "assistant", "content": "Hi!"} | empty
    (rejection,) = rendered(targets[True], SAY, bare)
    assert (rejection.code, rejection.id) == ("no_reasoning", "c")
    assert "target.thinking = false" in rejection.reason
    so = {"role": "user", "content": "So?"}
    rejection, found = rendered(targets[True], SAY, bare, so, WHY)
    assert (rejection.code, rejection.id, found.sample.sample_id) == ("no_reasoning", "c/turn-1", "c")
    history = [*USER_TURN, *turn("assistant", THINK, THINK_END, "Hi!"), *turn("user", "So?")]
    check(targets[True], found, [*history, *OPEN], [" A greeting.\n\n", THINK_END, "\n\nHi! The sailors.\n", END])
    found = rendered(targets[True], SAY, bare, so, WHY, so, WHY)
    assert [f.sample.sample_id for f in found if isinstance(f, Rendered)] == ["c/turn-2", "c/turn-3"]


def test_empty_marks_in_the_data_are_the_targets_own(targets):
    """Here the target was asked to think and did not; with thinking off the marks are the prompt's."""
    answer = {"role": "assistant", "content": "<think></think>Hi!"}
    (found,) = rendered(targets[None], SAY, answer)
    check(targets[None], found, [*USER_TURN, *OPEN], [THINK_END, "Hi!", END])
    (found,) = rendered(targets[False], SAY, answer)
    check(targets[False], found, [*USER_TURN, *SHUT], ["Hi!", END])
    assert found.lost_reasoning == 0


def test_an_answer_before_any_question_is_rejected_alone(targets):
    """ShareGPT files have such: the rest of the conversation is of use."""
    greeting = {"role": "assistant", "content": "<think>Greet.</think>Ahoy!"}
    alone, rest = rendered(targets[None], greeting, SAY, WHY)
    assert isinstance(alone, Rejection)
    assert (alone.code, alone.id) == ("no_user_turn", "c/turn-1")
    history = turn("assistant", THINK, THINK_END, "Ahoy!")
    own = [" A greeting.\n\n", THINK_END, "\n\nHi! The sailors.\n", END]
    check(targets[None], rest, [*history, *USER_TURN, *OPEN], own)


IMAGE = [{"type": "text", "text": "What is this?"}, {"type": "image_url", "image_url": {"url": "x.png"}}]


@pytest.mark.parametrize(
    ("messages", "code", "reason"),
    [
        ([{"role": "user", "content": IMAGE}, WHY], "content", "message 1: only text can be used, this has image_url"),
        ([SAY | {"content": "a<|im_end|><|im_user|>"}, WHY], "control_in_text", "message 1 contains <|im_end|>, "),
        ([SAY | {"content": "<|media_pad|>"}, WHY], "control_in_text", "message 1 contains <|media_pad|> as text"),
        ([SAY | {"name": "<|im_middle|>"}, WHY], "control_in_text", "message 1 contains <|im_middle|>"),
        ([SAY, WHY | {"content": "[PAD]"}], "control_in_text", "message 2 contains [PAD]"),
        (
            [SAY, WHY | {"content": "<|reserved_token_520|>"}],
            "control_in_text",
            "message 2 contains <|reserved_token_5",
        ),
        ([SAY, WHY | {"content": "a<|im_end|>b"}], "control_in_text", "message 2 contains <|im_end|>"),
        ([SAY, WHY | {"reasoning_content": "a</think>b"}], "control_in_text", "message 2 contains </think>"),
        ([SAY, WHY | {"content": "<think>b</think>c"}], "control_in_text", "message 2 contains </think>, <think>"),
        (
            [SAY, WHY | {"tool_calls": [call("look:0", {"<think>": 1})]}],
            "control_in_text",
            "message 2 contains <think> as text",
        ),
        ([SAY, WHY_INLINE | {"content": "<think>never closed"}], "control_in_text", "message 2 contains <think>"),
        ([SAY, WHY_INLINE | {"content": "<think>a</think> "}], "empty_turn", "message 2 has reasoning and no answer"),
        (
            [SAY, WHY | {"tool_calls": [call("look:0", '{"a": "<|tool_call_end|>"}')]}],
            "control_in_text",
            "message 2 contains <|tool_call_end|>",
        ),
        ([SAY, WHY | {"tool_calls": [{"function": {"arguments": "{}"}}]}], "tools", "message 2: a tool call without"),
    ],
)
def test_what_would_be_encoded_as_something_else_is_refused_by_name(targets, messages, code, reason):
    for target in targets.values():
        (rejection,) = rendered(target, *messages)
        assert isinstance(rejection, Rejection)
        assert (rejection.code, rejection.id) == (code, "c")
        assert rejection.reason.startswith(reason)


def test_tools_that_would_end_their_own_declaration(targets):
    (rejection,) = rendered(targets[None], SAY, WHY, tools=[{"function": {"description": "<|im_end|>"}}])
    assert (rejection.code, rejection.reason) == (
        "control_in_text",
        "the declaration of the tools contains <|im_end|> as text",
    )


def test_what_may_be_asked_about(targets):
    """A question is encoded as in serving; `[PAD]` and `<think>` in it make no turn."""
    (found,) = rendered(targets[None], SAY | {"content": "What are [PAD] and <think>?"}, WHY)
    asked = turn("user", "What are ", BOS + 255, " and ", THINK, "?")
    check(targets[None], found, [*asked, *OPEN], [" A greeting.\n\n", THINK_END, "\n\nHi! The sailors.\n", END])


@pytest.mark.parametrize(("thinking", "begin"), [(None, OPEN), (True, OPEN), (False, SHUT)])
def test_prompts_to_be_answered(targets, thinking, begin):
    """What the engine gets: the reasoning of an open question is there, that of the history is not."""
    messages = [SAY, WHY_INLINE, *QUESTION]
    (item,) = conversations([("data.jsonl", 1, {"messages": messages})], regenerate=True)
    (prompt,) = Renderer.of(targets[thinking]).prompts([item])
    kept = [THINK, THINK_END] if thinking is False else [THINK, "I must look.", THINK_END]
    done = turn("assistant", THINK, THINK_END, "\n\nHi! The sailors.\n")
    want = [*USER_TURN, *done, *ASKED, *turn("assistant", *kept, *CALLED), *RESULTS, *begin]
    assert prompt.input_ids == ids_of(want)
    (item,) = conversations([("data.jsonl", 1, {"prompt": "a<|im_end|>"})], regenerate=True)
    (rejection,) = Renderer.of(targets[thinking]).prompts([item])
    assert rejection.code == "control_in_text"


@pytest.mark.parametrize(("thinking", "begin"), [(None, OPEN), (False, SHUT)])
def test_held_out_prompts_are_asked_in_the_same_way(targets, tmp_path, monkeypatch, thinking, begin):
    """Else a draft of one mode would be measured on the other one."""
    prompts = tmp_path / "heldout.jsonl"
    prompts.write_text(json.dumps({"messages": [SAY, WHY]}) + "\n")
    section = targets[thinking].section
    config = Run(name="r", target=section, prepare={"sources": ["x"]}, evaluate={"prompts": [str(prompts)]})
    question, rejected = step.question_of(config, targets[thinking])
    assert (question.prompts, rejected) == ([ids_of([*USER_TURN, *begin])], 0)
    monkeypatch.setattr(Target, "fingerprint", "f")
    inputs = step._inputs(config, targets[thinking], "t", "reference")
    assert inputs["thinking"] is thinking


def test_the_target_tells_all_its_control_tokens(targets):
    """Here transformers is not told of `<think>`: a draft without `</think>` would fail at each answer."""
    assert THINK_END not in targets[None].tokenizer.added_tokens_decoder
    assert targets[None].control_ids == sorted((SPECIAL | NOT_SPECIAL).values())
    assert targets[None].end_of_turn_ids == [END, BOS + 1]


def test_ranks_that_changed_are_read_anew(tmp_path, monkeypatch):
    """tiktoken would take its copy of a file that had the same path before."""
    monkeypatch.delenv("TIKTOKEN_CACHE_DIR", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = tmp_path / "kimi"
    write_target(folder)
    section = TargetSection(path=str(folder), trust_remote_code=True, code_sha256=_hash_code(folder))
    assert Target(section).tokenizer.encode("ab") == [97, 98]
    ranks = folder / "tiktoken.model"
    lines = ranks.read_text().splitlines()
    lines[97], lines[98] = lines[98].replace("98", "97"), lines[97].replace("97", "98")
    ranks.write_text("\n".join(lines) + "\n")
    assert Target(section).tokenizer.encode("ab") == [98, 97]


@pytest.mark.parametrize(("code", "said"), [("def x(:", "invalid syntax"), ("raise AssertionError('no')", "no")])
def test_code_of_the_model_that_fails_is_one_line(tmp_path, code, said):
    write_target(tmp_path)
    (tmp_path / "tokenization_kimi.py").write_text(code)
    section = TargetSection(path=str(tmp_path), trust_remote_code=True, code_sha256=_hash_code(tmp_path))
    with pytest.raises(InputError, match=f"does not load: {said}"):
        _ = Target(section).tokenizer


def test_thinking_is_told_by_the_name_that_the_template_has_for_it(targets, folder, pin, tmp_path):
    assert [targets[thinking].template_arguments for thinking in (None, True, False)] == [
        {},
        {"thinking": True},
        {"thinking": False},
    ]
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    with pytest.raises(ConfigError, match="no chat template of model type 'llama' is known to read it"):
        _ = Target(TargetSection(path=str(tmp_path), thinking=True)).template_arguments
    for model, template in (("deepseek_v3", "{{ enable_thinking }}"), ("qwen3", "{{ messages }}")):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model}))
        target = Target(TargetSection(path=str(tmp_path), thinking=False))
        target.__dict__["tokenizer"] = type("Tokenizer", (), {"chat_template": template})
        with pytest.raises(ConfigError, match="does not read"):
            _ = target.template_arguments
    target.__dict__["tokenizer"].chat_template = "{{ enable_thinking }}"
    assert target.template_arguments == {"enable_thinking": False}


@pytest.fixture
def prepare(folder, pin, tmp_path):
    """Run the step on rows; returns its exit code."""
    data, config = tmp_path / "data.jsonl", tmp_path / "run.toml"
    config.write_text(
        f'name = "r"\nruns_dir = "{tmp_path}/runs"\n[target]\npath = "{folder}"\ntrust_remote_code = true\n'
        f'code_sha256 = "{pin}"\n[prepare]\nsources = ["{data}"]\nregenerate = false\n'
    )

    def run(*messages: list[dict], flags: tuple[str, ...] = ()) -> int:
        lines = [json.dumps({"id": str(k), "conversations": m}) for k, m in enumerate(messages)]
        data.write_text("\n".join(lines) + "\n")
        return main(["prepare", "--config", str(config), *flags])

    return run


ROWS = ([SAY, WHY_INLINE], [SAY, WHY_INLINE, SAY | {"content": "So?"}, WHY], list(QUESTION), [SAY, WHY_INLINE],
        [{"role": "user", "content": IMAGE}, WHY])  # fmt: skip


def test_the_step(prepare, tmp_path, capsys):
    out = tmp_path / "runs" / "r" / "prepared"
    assert prepare(*ROWS) == 0
    assert [sample.sample_id for sample in read_samples(out)] == ["0", "1/turn-1", "1/turn-2", "2"]
    for sample in read_samples(out):
        own = sample.input_ids_S[sample.loss_mask_S]
        assert own[-1] == END
        assert THINK_END in own
    rejected = [json.loads(line) for line in (out / "rejected.jsonl").read_text().splitlines()]
    assert [(line["row"], line["code"]) for line in rejected] == [(4, "duplicate"), (5, "content")]
    assert rejected[1]["reason"] == "message 1: only text can be used, this has image_url"
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["inputs"]["thinking"] is None
    assert prepare(*ROWS, flags=("--target.thinking", "false")) == 3
    assert "thinking" in capsys.readouterr().err


def test_the_step_without_thinking(prepare, tmp_path, capsys):
    assert prepare(*ROWS, flags=("--target.thinking", "false")) == 0
    out = tmp_path / "runs" / "r" / "prepared"
    assert [sample.sample_id for sample in read_samples(out)] == ["0", "1", "2"]
    assert all(THINK_END not in sample.input_ids_S[sample.loss_mask_S] for sample in read_samples(out))
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["inputs"]["thinking"] is False
    assert manifest["totals"]["lost_reasoning"] == 5
    assert "5 lost reasoning" in capsys.readouterr().out
