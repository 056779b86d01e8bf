"""Code that comes with a model runs only where it is allowed and pinned."""

import json

import pytest

from pipeline.config import TargetSection
from pipeline.errors import ConfigError, InputError
from pipeline.target import Target

PINNED = {"path": "owner/model", "trust_remote_code": True}


def test_off_by_default(tmp_path):
    (tmp_path / "code.py").write_text("")
    assert Target(TargetSection(path=str(tmp_path))).trust_remote_code is False


@pytest.mark.parametrize("revision", [None, "main", "abc1234", "A" * 40, "a" * 41])
def test_a_name_on_the_hub_needs_a_commit(revision):
    with pytest.raises(ConfigError, match="pin it with the 40 digits of a commit"):
        _ = Target(TargetSection(**PINNED, revision=revision)).trust_remote_code


def test_a_folder_without_a_model_has_no_code_to_pin(tmp_path):
    """Its hash, that of nothing, would be asked to be pinned."""
    with pytest.raises(InputError, match=r"config\.json is missing"):
        _ = Target(TargetSection(path=str(tmp_path), trust_remote_code=True)).trust_remote_code


def test_a_misspelt_folder_is_not_taken_for_a_name_on_the_hub(tmp_path, monkeypatch):
    """models/Kimi-K2.5 where only models/ is there: nothing on the hub is meant."""
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match="models/model is not a folder"):
        _ = Target(TargetSection(path="models/model", trust_remote_code=True)).folder


def test_what_was_not_fetched_is_told_where_the_hub_is_out_of_reach(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*_args, **_more):
        raise LocalEntryNotFoundError("set HF_HUB_OFFLINE=0")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(InputError, match=r"owner/model has not been fetched, .* Run prepare first"):
        _ = Target(TargetSection(path="owner/model")).folder


def test_a_pinned_name_on_the_hub(monkeypatch, tmp_path):
    target = Target(TargetSection(**PINNED, revision="a" * 40))
    monkeypatch.setattr(Target, "folder", tmp_path)
    assert target.trust_remote_code is True


def test_every_file_of_code_counts(tmp_path):
    """Renamed, changed, added in a folder below: each is another code."""
    (tmp_path / "config.json").write_text("{}")
    pins = set()
    for name, content in (("a.py", "1"), ("b.py", "1"), ("b.py", "2"), ("below/c.py", "")):
        (tmp_path / "below").mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
        with pytest.raises(ConfigError, match="is not pinned, so it does not run") as error:
            _ = Target(TargetSection(path=str(tmp_path), trust_remote_code=True)).trust_remote_code
        pins.add(str(error.value).split('"')[1])
    assert len(pins) == 4
    last = str(error.value).split('"')[1]
    assert Target(TargetSection(path=str(tmp_path), trust_remote_code=True, code_sha256=last)).trust_remote_code is True


def test_code_of_another_repository_is_refused(monkeypatch, tmp_path):
    auto_map = {"AutoTokenizer": ["someone/else--tokenization.Tokenizer", None]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    monkeypatch.setattr(Target, "folder", tmp_path)
    with pytest.raises(InputError, match="takes code from another repository"):
        _ = Target(TargetSection(**PINNED, revision="a" * 40)).trust_remote_code
