"""Drafts to begin from: every form in which public ones come, and every difference by its name."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pipeline.config import TargetSection, TrainSection
from pipeline.errors import ConfigError, InputError
from pipeline.target import Target
from pipeline.train.draft import Draft, draft_config
from pipeline.train.init_from import begin_from, fingerprint
from tests.training import AUX_LAYERS

WORDS = torch.arange(0, 80, 2)
"""Target ids that this run's draft can say."""


@pytest.fixture(scope="module")
def target(llama_folder: Path) -> Target:
    return Target(TargetSection(path=str(llama_folder), dtype="float32"))


def new_draft(target: Target, **section) -> Draft:
    head = target.head()
    draft = Draft(draft_config(target, TrainSection(**section), list(AUX_LAYERS), len(WORDS)), head.embedding_VH)
    draft.initialise(0, head.norm_H, head.lm_head_VH[WORDS])
    return draft


def trained(target: Target, **section) -> Draft:
    draft = new_draft(target, **section)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.normal_(0.5, 0.2)
    return draft


def save(folder: Path, draft: Draft, form: str = "ours", words: torch.Tensor = WORDS) -> Path:
    """The draft as ours, SpecForge's, the EAGLE authors' (pickled) or speculators' are; sharded in two."""
    folder.mkdir()
    config = json.loads(draft.config.to_json_string(use_diff=False))
    tensors = {name: tensor.clone() for name, tensor in draft.weights().items()}
    tensors["d2t"] = words - torch.arange(len(words))
    tensors["t2d"] = torch.zeros(draft.config.vocab_size, dtype=torch.bool).index_fill(0, words, True)
    if form in ("specforge", "eagle"):
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    if form == "speculators":
        inner = {
            key: config.pop(key) for key in list(config) if key.startswith(("num_", "rope", "rms", "head", "inter"))
        }
        inner["hidden_size"] = config.pop("hidden_size")
        inner["vocab_size"] = config.pop("vocab_size")
        config |= {"transformer_layer_config": inner, "speculators_model_type": "eagle3"}
        config.pop("eagle_config")
        tensors["embed_tokens.weight"] = draft.embedding_VH.clone()
        tensors["verifier_norm.weight"] = torch.zeros(3)
    (folder / "config.json").write_text(json.dumps(config))
    if form == "eagle":
        torch.save(tensors, folder / "pytorch_model.bin")
    elif form == "sharded":
        names = sorted(tensors)
        files = {name: f"model-{i % 2 + 1:05d}-of-00002.safetensors" for i, name in enumerate(names)}
        for file in set(files.values()):
            save_file({name: tensors[name] for name in names if files[name] == file}, folder / file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    else:
        save_file(tensors, folder / "model.safetensors")
    return folder


def begin(draft: Draft, folder: Path, unequal: str = "stop", words: torch.Tensor = WORDS) -> list[str]:
    return begin_from(draft, folder, words, list(AUX_LAYERS), unequal)  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["ours", "specforge", "eagle", "speculators", "sharded"])
def test_every_form_gives_the_weights(tmp_path, target, form):
    source, draft = trained(target), new_draft(target)
    said = begin(draft, save(tmp_path / "draft", source, form))
    for (name, one), two in zip(source.named_parameters(), draft.parameters(), strict=True):
        assert torch.equal(one, two), name
    assert said == [f"train  begins from {tmp_path / 'draft'}: 40 of 40 words' output rows"]


def test_output_rows_go_to_their_words(tmp_path, target):
    source, draft = trained(target), new_draft(target)
    others = torch.arange(0, 120, 3)  # 14 of ours: 0, 6, ... 78
    before = draft.lm_head.weight.detach().clone()
    said = begin(draft, save(tmp_path / "draft", source, words=others))
    for number, word in enumerate(WORDS.tolist()):
        there = (others == word).nonzero().flatten()
        wanted = source.lm_head.weight[int(there)] if len(there) else before[number]
        assert torch.equal(draft.lm_head.weight[number], wanted), word
    assert said == [
        f"train  begins from {tmp_path / 'draft'}: 14 of 40 words' output rows, the others start as the target's"
    ]


def edited(folder: Path, **values) -> Path:
    config = json.loads((folder / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return folder


@pytest.mark.parametrize(
    ("values", "what"),
    [
        (
            {"norm_before_residual": None},
            "norm_before_residual False, this run makes True (set train.norm_before_resid",
        ),
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps 1e-06, this run makes 1e-05 (it comes from the target"),
        ({"rope_theta": 10000.0}, "rope_theta 10000.0, this run makes 50000.0 (it comes from the target"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "rope_scaling {'rope_type': 'linear', 'factor': 2.0}",
        ),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 3, 5]},
            "aux layers [1, 3, 5], this run makes [2, 4, 6] (set extract",
        ),
    ],
)
def test_a_difference_is_one_line_that_names_it(tmp_path, target, values, what):
    folder = edited(save(tmp_path / "draft", trained(target)), **values)
    with pytest.raises(ConfigError) as refused:
        begin(new_draft(target), folder)
    line, advice = str(refused.value).splitlines()
    assert f"train: init_from {folder} has {what}" in line
    assert advice == 'train: train.init_from_unequal = "warn" trains it all the same'
    said = begin(new_draft(target), folder, "warn")
    assert said[0] == line
    assert len(said) == 2


def test_layers_that_are_not_named_are_those_that_vllm_takes(tmp_path, target):
    folder = save(tmp_path / "draft", trained(target))
    edited(folder, eagle_aux_hidden_state_layer_ids=None, eagle_config=None)
    begin_from(new_draft(target), folder, WORDS, list(AUX_LAYERS), "stop")
    with pytest.raises(ConfigError, match=r"aux layers \[2, 4, 5\]"):
        begin_from(new_draft(target), folder, WORDS, [2, 4, 5], "stop")


@pytest.mark.parametrize(
    ("section", "what"),
    [
        ({"intermediate_size": 512}, "intermediate_size 512, this run makes 256 (set train.intermediate_size)"),
        ({"num_attention_heads": 8}, "num_attention_heads 8, this run makes 4 (set train.num_attention_heads)"),
        ({"head_dim": 64}, "head_dim 64, this run makes 32 (set train.head_dim)"),
        ({"num_layers": 2}, "num_hidden_layers 2, this run makes 1 (set train.num_layers)"),
    ],
)
def test_other_sizes_are_named_and_never_loaded(tmp_path, target, section, what):
    folder = save(tmp_path / "draft", trained(target, **section))
    for unequal in ("stop", "warn"):
        with pytest.raises(ConfigError) as refused:
            begin(new_draft(target), folder, unequal)
        assert what in str(refused.value)


def test_another_embedding_is_named(tmp_path, target):
    folder = save(tmp_path / "draft", trained(target), "speculators")
    tensors = load_file(folder / "model.safetensors")
    tensors["embed_tokens.weight"][7] += 1
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="has an embedding of its own"):
        begin(new_draft(target), folder)


def without(folder: Path, *names: str, **more: torch.Tensor) -> None:
    tensors = load_file(folder / "model.safetensors")
    save_file({n: t for n, t in tensors.items() if n not in names} | more, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda f: without(f, "fc.weight", "norm.weight"), "has no fc.weight and 1 more: not a whole"),
        (lambda f: without(f, "lm_head.weight"), "has no lm_head.weight"),
        (lambda f: without(f, **{"layers.1.x": torch.ones(1)}), "has layers.1.x, which this draft has no place for"),
        (lambda f: without(f, **{"fc.weight": torch.ones(2, 2)}), r"has fc.weight \[2, 2\], its configuration says"),
        (
            lambda f: without(f, **{"norm.weight": torch.full((128,), float("nan"))}),
            "norm.weight with numbers that are",
        ),
        (lambda f: without(f, d2t=torch.zeros(40, dtype=torch.long) - 1), "d2t does not name 40 different words"),
        (lambda f: os_truncate(f / "model.safetensors"), r"model.safetensors cannot be read \("),
        (lambda f: (f / "model.safetensors").unlink(), "has no weights: neither"),
        (lambda f: (f / "config.json").unlink(), "has no config.json"),
        (lambda f: (f / "config.json").write_text("{"), "is not a configuration"),
    ],
)
def test_damage_is_named(tmp_path, target, damage, what):
    folder = save(tmp_path / "draft", trained(target))
    damage(folder)
    with pytest.raises(InputError, match=what):
        begin(new_draft(target), folder)


def os_truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def test_a_missing_file_of_several_is_named(tmp_path, target):
    folder = save(tmp_path / "draft", trained(target), "sharded")
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(InputError, match=r"model-00002-of-00002.safetensors is missing: model.safetensors.index.json"):
        begin(new_draft(target), folder)


def test_other_weights_are_another_run(tmp_path, target):
    one = save(tmp_path / "one", trained(target))
    two = save(tmp_path / "two", trained(target))
    assert fingerprint(one) == fingerprint(two)
    without(two, **{"norm.weight": torch.ones(128)})
    assert fingerprint(one) != fingerprint(two)


@pytest.mark.parametrize(
    "wrong",
    [
        {"rms_norm_eps": None}, {"rope_theta": None}, {"eagle_aux_hidden_state_layer_ids": 3}, {"eagle_config": "x"},
        {"rope_scaling": "x"}, {"transformer_layer_config": "x"}, {"num_attention_heads": 0, "head_dim": None},
    ],
    ids=str,
)  # fmt: skip
def test_a_configuration_that_is_none_is_told_in_a_line(target, tmp_path, wrong):
    folder = save(tmp_path / "draft", trained(target))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | wrong))
    with pytest.raises(InputError, match=r"config\.json is not an? "):
        begin_from(new_draft(target), folder, WORDS, list(AUX_LAYERS), "stop")


def test_output_rows_that_are_not_finite_are_told(target, tmp_path):
    draft = trained(target)
    with torch.no_grad():
        draft.lm_head.weight[3] = float("nan")
    with pytest.raises(InputError, match=r"lm_head\.weight with numbers that are not finite"):
        begin_from(new_draft(target), save(tmp_path / "draft", draft), WORDS, list(AUX_LAYERS), "stop")


@pytest.mark.parametrize("content", [b"version https://git-lfs.github.com/spec/v1\n", b"<html></html>", b""])
def test_a_pickled_draft_that_is_none_is_told_in_a_line(target, tmp_path, content):
    folder = save(tmp_path / "draft", trained(target), "eagle")
    (folder / "pytorch_model.bin").write_bytes(content)
    with pytest.raises(InputError, match="cannot be read"):
        begin_from(new_draft(target), folder, WORDS, list(AUX_LAYERS), "stop")
