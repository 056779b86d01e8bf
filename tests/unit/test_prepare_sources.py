"""Rows of every accepted format become conversations; every other row is told with a code, none disappears."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.errors import InputError
from pipeline.prepare.conversations import Conversation, conversations
from pipeline.prepare.rejects import Rejection
from pipeline.prepare.sources import open_sources

PARTS = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]


def parse(*values, regenerate=False) -> list[Conversation | Rejection]:
    return list(conversations([("f", i, value) for i, value in enumerate(values, 1)], regenerate))


def rows(*names: Path | str) -> list[tuple[str, int, object]]:
    return [row for source in open_sources([str(name) for name in names]) for row in source.rows()]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": TALK},
        {"conversations": TALK},
        {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]},
        {"messages": [{"role": "user", "content": PARTS}, TALK[1]]},
        {"messages": TALK, "prompt": "other", "category": "c", "score": 3},
        {"messages": [*TALK, {"role": "user", "content": "never answered"}]},
    ],
)
def test_formats(row):
    (item,) = parse(row)
    assert item.messages == TALK


@pytest.mark.parametrize("row", [{"prompt": "hi"}, {"turns": ["hi", "and then?"]}, {"messages": TALK}])
def test_prompts_to_regenerate(row):
    (item,) = parse(row, regenerate=True)
    assert item.messages == TALK[:1]
    assert item.unused_turns == (1 if "turns" in row else 0)


def test_history_is_kept_when_the_last_answer_is_regenerated():
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}]}
    result = {"role": "tool", "content": "42", "tool_call_id": "1"}
    (item,) = parse({"messages": [TALK[0], call, result, TALK[1]]}, regenerate=True)
    assert item.messages == [TALK[0], call, result]


def test_keys_that_templates_read_are_kept_and_others_are_not():
    message = {"role": "assistant", "content": "x", "reasoning_content": "r", "name": "n", "weight": 1}
    tools = [{"type": "function"}]
    for given in (tools, json.dumps(tools)):
        (item,) = parse({"messages": [TALK[0], message], "tools": given})
        assert item.messages[1] == {"role": "assistant", "content": "x", "reasoning_content": "r", "name": "n"}
        assert item.tools == tools


def user(content) -> dict:
    return {"messages": [{"role": "user", "content": content}, TALK[1]]}


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ([1], "not_object"),
        ("text", "not_object"),
        ({}, "no_conversation"),
        ({"messages": []}, "no_conversation"),
        ({"messages": "hi"}, "no_conversation"),
        ({"prompt": 5}, "no_conversation"),
        ({"prompt": "  "}, "empty_turn"),
        ({"turns": []}, "no_conversation"),
        ({"messages": ["hi"]}, "message"),
        ({"messages": [{"role": "narrator", "content": "x"}]}, "role"),
        ({"messages": [{"content": "x"}]}, "role"),
        ({"messages": [{"role": ["user"], "content": "x"}]}, "role"),
        ({"messages": [{"role": "user"}, TALK[1]]}, "empty_turn"),
        (user(""), "empty_turn"),
        (user(" \n"), "empty_turn"),
        (user(None), "empty_turn"),
        (user([]), "empty_turn"),
        (user(7), "content"),
        (user({"text": "x"}), "content"),
        (user([{"type": "image_url", "image_url": "x"}]), "content"),
        (user(["x"]), "content"),
        ({"messages": TALK, "tools": "{"}, "tools"),
        ({"messages": TALK, "tools": {"a": 1}}, "tools"),
        ({"messages": [TALK[0], {**TALK[1], "tool_calls": "f()"}]}, "tools"),
        ({"messages": [TALK[1]]}, "no_user_turn"),
        ({"messages": [TALK[0]]}, "no_assistant_turn"),
        ({"prompt": "hi"}, "no_assistant_turn"),
        (user("half \ud800"), "encoding"),
    ],
)
def test_rejections(value, code):
    (item,) = parse(value)
    assert (item.code, item.source, item.row) == (code, "f", 1)
    assert item.reason


def test_nothing_to_answer():
    (item,) = parse({"messages": [*TALK, {"role": "system", "content": "x"}]}, regenerate=True)
    assert item.code == "no_user_turn"


def test_duplicates_keep_the_first_and_are_told():
    again = {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}], "id": "b"}
    first, second = parse({"messages": TALK, "id": "a"}, again)
    assert (first.id, second.id, second.code) == ("a", "b", "duplicate")
    one, two = parse(
        {"messages": TALK}, {"messages": [TALK[0], {"role": "assistant", "content": "other"}]}, regenerate=True
    )
    assert isinstance(one, Conversation)
    assert two.code == "duplicate"  # they differ only in the answer that is not used


def test_ids_are_the_data_s_own_where_they_are_unique():
    names = ["a", "a", 7, None, " ", True, "x/turn-1"]
    values = [{"id": n, "messages": [{"role": "user", "content": str(i)}, TALK[1]]} for i, n in enumerate(names)]
    ids = [item.id for item in parse(*values)]
    assert [ids[0], ids[2]] == ["a", "7"]
    assert len(set(ids)) == len(names)
    assert all(len(name) == 24 for name in ids[3:])
    assert ids == [item.id for item in parse(*values)]
    assert parse({"question_id": 81, "messages": TALK})[0].id == "81"


def test_jsonl_lines(tmp_path):
    path = tmp_path / "a.jsonl"
    good = json.dumps({"messages": TALK}, ensure_ascii=False)
    path.write_bytes(
        b"\xef\xbb\xbf"
        + good.encode()
        + b"\n\n{broken\n\xff\n"
        + b"[" * 100_000
        + b"\n"
        + '{"prompt": "ß 你"}'.encode()
    )
    items = list(conversations(rows(path), True))
    assert [getattr(item, "code", "ok") for item in items] == ["ok", "json", "encoding", "json", "ok"]
    assert [item.row for item in items] == [1, 3, 4, 5, 6]
    assert items[4].messages[0]["content"] == "ß 你"


def test_parquet_and_folders_are_read_in_order(tmp_path):
    (tmp_path / "d" / "sub").mkdir(parents=True)
    (tmp_path / "d" / ".hidden").mkdir()
    pq.write_table(pa.table({"messages": [TALK, None], "score": [1, 2]}), tmp_path / "d" / "b.parquet")
    (tmp_path / "d" / "a.jsonl").write_text('{"prompt": "first"}\n')
    (tmp_path / "d" / "sub" / "c.jsonl").write_text('{"prompt": "last"}\n')
    (tmp_path / "d" / ".hidden" / "x.jsonl").write_text('{"prompt": "no"}\n')
    (tmp_path / "d" / "README.md").write_text("no data")
    items = list(conversations(rows(tmp_path / "d"), True))
    assert [getattr(i, "code", None) or i.messages[0]["content"] for i in items] == [
        "first", "hi", "no_conversation", "last"]  # fmt: skip


def test_a_data_set_is_streamed_and_its_faults_are_one_line(tmp_path, monkeypatch):
    """`owner/name:split`; a local folder in the hub's layout stands in for the network."""
    pytest.importorskip("datasets")
    monkeypatch.chdir(tmp_path)
    data = tmp_path / "owner" / "name" / "data"
    data.mkdir(parents=True)
    pq.write_table(pa.table({"messages": [TALK]}), data / "test-00000-of-00001.parquet")
    pq.write_table(pa.table({"messages": [TALK, TALK]}), data / "train-00000-of-00001.parquet")
    (source,) = open_sources(["owner/name:test"])
    assert [value["messages"] for _, _, value in source.rows()] == [TALK]
    assert {entry["split"] for entry in source.identity()} == {"test"}
    (wrong,) = open_sources(["owner/name:nothing"])
    with pytest.raises(InputError, match="owner/name:nothing") as caught:
        list(wrong.rows())
    assert "\n" not in str(caught.value)


def test_a_data_set_that_cannot_be_fetched(monkeypatch):
    import huggingface_hub

    def fail(*_args, **_kwargs):
        raise ConnectionError("no network\nsecond line")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", fail)
    (source,) = open_sources(["owner/name"])
    with pytest.raises(InputError, match="no network") as caught:
        source.identity()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.jsonl", None, "does not exist"),
        ("missing", None, "does not exist"),
        ("a/b/c", None, "does not exist"),
        ("data.csv", b"a,b", "neither"),
        ("bad.parquet", b"PAR1 no", "not a readable Parquet"),
        ("empty.parquet", b"", "not a readable Parquet"),
        ("list.json", b'[{"prompt": "x"}]', "jq"),
    ],
)
def test_files_that_cannot_be_used(tmp_path, monkeypatch, name, content, message):
    monkeypatch.chdir(tmp_path)
    if content is not None:
        Path(name).write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        rows(name)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_parquet_file_of_something_else(tmp_path):
    pq.write_table(pa.table({"text": ["x"]}), tmp_path / "t.parquet")
    with pytest.raises(InputError, match=r"no column .*\(it has text\)"):
        rows(tmp_path / "t.parquet")


def test_an_empty_folder(tmp_path):
    with pytest.raises(InputError, match="without a"):
        rows(tmp_path)


def test_a_data_set_out_of_reach_is_told_by_its_first_cause(monkeypatch):
    """What wraps it is a screenful about retries, and says nothing of what to do."""
    from huggingface_hub import HfApi

    def out_of_reach(*_arguments, **_more):
        try:
            try:
                raise OSError("Name or service not known")
            except OSError as error:
                raise ConnectionError("HTTPSConnectionPool(host='hub', port=443)") from error
        except ConnectionError:
            raise RuntimeError("Max retries exceeded")  # noqa: B904  as requests does

    monkeypatch.setattr(HfApi, "dataset_info", out_of_reach)
    (source,) = open_sources(["owner/name"])
    with pytest.raises(InputError, match=r"as a data set: Name or service not known\. .* put files into data/"):
        source.identity()
