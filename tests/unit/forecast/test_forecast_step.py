"""What `python -m pipeline forecast` prints, and how it ends."""

import json
import re
from collections import namedtuple
from pathlib import Path

import pytest

from pipeline.__main__ import main
from pipeline.config import Run
from pipeline.forecast.shapes import Shapes, target_shapes
from pipeline.forecast.weights import target_weights
from pipeline.target import Target
from tests.forecasting import LLAMA
from tests.models import save_tiny_deepseek
from tests.runs import make_samples, write_prepared

KIMI = """
name = "kimi"
runs_dir = "{folder}"
[target]
path = "moonshotai/Kimi-K2.5"
tensor_parallel_size = 8
[prepare]
sources = ["none"]
[train]
intermediate_size = 18432
[forecast]
samples = 100000
"""
KIMI_TABLE = """\
Kimi-K2.5, draft of 1 layer, 32,000 words: forecast of run kimi
  target             61 layers, hidden size 7,168, 594.2 GB
                     shapes: forecast/recorded, as the hub did not give them; size: computed from config.json
  samples            100,000 of 2,048 tokens, 204.8 M tokens (assumed: forecast.samples, forecast.tokens_per_sample)
disk
  target             594.2 GB, 594.2 GB of it to be fetched   {cache}
  prepared           1.3 GB at most
  hidden states      11,745.1 GB in bfloat16, 23,489.1 GB in float32, 5,876.3 GB in fp8; this run: bfloat16
  checkpoints        66.7 GB: 4 of 16.7 GB
  to be written      12,407.3 GB, 13,000.0 GB free in {here}: fits
hours
  prepare            unknown: 102.4 M tokens to generate; set forecast.generation_tokens_per_s
  extract            7 h 44 at 7,350 tok/s, NCCL tuned; writes 421 MB/s
                     64 h 56 at 876 tok/s, NCCL untuned
                     published rates of Kimi-K2.5 on eight RTX PRO 6000; forecast.prefill_tokens_per_s sets yours
                     prefill alone; engine stream reached 96 % of it on one H200 (a Llama of 8 B)
  train              unknown: 778.2 M tokens in 380,000 steps; set forecast.train_tokens_per_s
"""
PUBLISHED_KIMI_BYTES = 554 * 2**30
"""Of all files, the image encoder's 0.9 GB included."""
Usage = namedtuple("Usage", "total used free")


@pytest.fixture
def kimi(tmp_path, monkeypatch):
    """A run of Kimi-K2.5 on a machine that cannot reach the hub. Gives the arguments of the command line."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("pipeline.forecast.shapes.local_folder", lambda section: None)
    monkeypatch.setattr("pipeline.forecast.disk.local_folder", lambda section: None)
    monkeypatch.setattr("pipeline.forecast.disk.shutil.disk_usage", lambda path: Usage(0, 0, 13_000 * 10**9))
    path = tmp_path / "run.toml"
    path.write_text(KIMI.format(folder=tmp_path / "runs"))
    return ["forecast", "--config", str(path)]


def test_kimi_is_forecast_without_a_gpu_the_hub_or_a_weight(kimi, tmp_path, capsys):
    assert main(kimi) == 0
    out = capsys.readouterr().out
    expected = KIMI_TABLE.format(cache=tmp_path / "cache", here=tmp_path)
    assert out[: len(expected)] == expected
    memory = out[len(expected) :]
    assert memory.startswith("memory of a GPU in GiB (8 x 95.5)\n")
    assert memory.count(": fits") == 3
    assert list(tmp_path.iterdir()) == [tmp_path / "run.toml"], "nothing was written"


def test_memory_of_the_machine_is_that_of_what_is_in_hand(kimi, capsys):
    assert main([*kimi, "--extract.engine", "stream", "--extract.writers", "2"]) == 0
    assert capsys.readouterr().out.endswith(
        "memory of the machine\n"
        "  extract            16.9 GB\n"
        "                     4 shards in hand 15.0 GB + 4 steps on their way 1.9 GB, pinned\n"
        "  train              17.7 GB\n"  # a row's states are 88 and 29 MB, pinned 2**27 and 2**25 bytes
        "                     processes: 1, rows ahead in each: 6 of 0.2 GB; a checkpoint 16.7 GB\n"
    )


def test_rows_are_decoded_on_the_gpu(kimi, capsys):
    """Stored in fp8 they take half the host's memory, and on the GPU as many bytes more."""
    said = []
    for more in ([], ["--extract.store_dtype", "fp8"]):
        assert main([*kimi, "--train.tokens_per_row", "16384", *more]) == 0
        said.append(capsys.readouterr().out)
    assert "rows ahead in each: 6 of 1.3 GB" in said[0]  # 705 and 235 MB, pinned 2**30 and 2**28 bytes
    assert "rows ahead in each: 6 of 0.7 GB" in said[1]
    exact, encoded = (float(re.search(r"target's words .* activations ([0-9.]+)", out)[1]) for out in said)
    assert encoded - exact == pytest.approx(16384 * (4 * 7168 + 16 + 25) / 2**30, abs=0.11)


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["--forecast.samples", "200000"], "disk"),
        (["--forecast.gpu_memory_gib", "80"], "memory of prepare, memory of extract"),
        (["--train.tokens_per_row", "65536"], "memory of train"),
        (["--forecast.gpu_count", "4"], "target.tensor_parallel_size"),
    ],
)
def test_what_does_not_fit_is_named(kimi, capsys, arguments, what):
    assert main([*kimi, *arguments]) == 4
    said = capsys.readouterr()
    assert said.err == f"forecast: does not fit: {what}\n"
    assert said.out.count("DOES NOT FIT") == len(what.split(", "))


@pytest.mark.parametrize(("sharding", "code"), [("auto", 0), ("full", 0), ("none", 4)])
def test_a_draft_too_large_for_a_gpu_is_sharded(kimi, capsys, sharding, code):
    """Six layers: a replica takes 99 GiB; of a sharded one an eighth is kept, and weights are whole in a step."""
    few = ["--forecast.samples", "10000", "--train.rows_per_step", "8", "--train.num_layers", "6"]
    assert main([*kimi, *few, "--train.sharding", sharding]) == code
    out = capsys.readouterr().out
    if sharding == "none":
        assert "train              99.0 of 95.5: DOES NOT FIT" in out
        assert "train.sharding is none; sharded takes 56.4" in out
    else:
        assert "train              56.4 of 95.5, sharded: fits" in out
        assert "weights 18.2 + gradients 0.9 + optimiser 4.0 + target's words" in out
        assert f"train.sharding is {sharding}; a replica takes 99.0" in out


def test_a_replica_that_fits_is_not_sharded(kimi, capsys):
    main([*kimi, "--train.rows_per_step", "8"])
    assert "sharded" not in capsys.readouterr().out


def test_rates_and_lengths_give_hours(kimi, capsys):
    more = {"generation_tokens_per_s": 1000, "train_tokens_per_s": 20000, "answer_tokens_per_sample": 500}
    assert main([*kimi, *(str(part) for key, value in more.items() for part in (f"--forecast.{key}", value))]) == 0
    out = capsys.readouterr().out
    assert "prepare            13 h 53: 50.0 M tokens to generate at 1,000 tok/s" in out
    assert "train              10 h 48: 778.2 M tokens in 380,000 steps at 20,000 tok/s" in out


@pytest.mark.parametrize(
    ("rows", "steps", "share", "in_all"),
    [
        (8, 14_504, "32 % of a step of 0.68 s (rows in each: 1)", "54 min"),
        (16, 7252, "16 % of a step of 1.37 s (rows in each: 2)", "27 min"),
    ],
)
def test_gradients_take_their_way_over_the_links(kimi, capsys, rows, steps, share, in_all):
    """1,190,948,864 weights of 4 bytes, 14/8 of that over a link of 37.6 GB/s: 0.2217 s a step, whatever its rows."""
    flags = {"train.rows_per_step": rows, "train.tokens_per_row": 4096, "train.validation_share": 0.01,
             "forecast.tokens_per_sample": 1200, "forecast.train_tokens_per_s": 48_000}  # fmt: skip
    assert main([*kimi, *(str(part) for key, value in flags.items() for part in (f"--{key}", value))]) == 0
    assert (
        f"  train              2 h 45: 475.2 M tokens in {steps:,} steps at 48,000 tok/s\n"
        "                     gradients: 4.8 GB a step, 8.3 GB through each of 8 GPUs' links: 0.22 s at 37.6 GB/s\n"
        f"                     {share}, {in_all} in all; computing can hide 0.04 s of a step's at most\n"
    ) in capsys.readouterr().out
    del flags["forecast.train_tokens_per_s"]
    flags["forecast.all_reduce_gb_per_s"] = 18.8
    assert main([*kimi, *(str(part) for key, value in flags.items() for part in (f"--{key}", value))]) == 0
    out = capsys.readouterr().out
    assert "links: 0.44 s at 18.8 GB/s\n" in out
    assert "of a step of" not in out, "it is not known how long a step is"


def test_muons_matrices_take_theirs_too(kimi, capsys):
    """961,544,192 of those weights, once more over a link: 0.1023 s."""
    flags = {"train.rows_per_step": 8, "train.tokens_per_row": 4096, "train.validation_share": 0.01,
             "forecast.tokens_per_sample": 1200, "forecast.train_tokens_per_s": 48_000,
             "train.optimizer": "muon"}  # fmt: skip
    given = [str(part) for key, value in flags.items() for part in (f"--{key}", value)]
    assert main([*kimi, *given]) == 0
    assert (
        " 0.22 s at 37.6 GB/s\n"
        "                     matrices, from the one that Muon stepped each in: 3.8 GB a step, 0.10 s\n"
        "                     47 % of a step of 0.68 s (rows in each: 1), 1 h 18 in all;"
    ) in capsys.readouterr().out
    main([*kimi, *given, "--train.sharding", "full"])
    assert "Muon" not in capsys.readouterr().out


def test_rates_of_kimi_are_not_another_targets(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    path = tmp_path / "run.toml"
    path.write_text(f'name = "x"\n[target]\npath = "{tmp_path}"\n[prepare]\nsources = ["none"]\n')
    main(["forecast", "--config", str(path)])
    assert (
        "extract            unknown: 204.8 M tokens to run; set forecast.prefill_tokens_per_s"
        in capsys.readouterr().out
    )
    main(["forecast", "--config", str(path), "--forecast.prefill_tokens_per_s", "40000"])
    assert "extract            1 h 25 at 40,000 tok/s" in capsys.readouterr().out


@pytest.mark.parametrize(
    "lengths", [{"tokens_per_sample": 3000}, {"tokens_per_sample": 100, "answer_tokens_per_sample": 200}]
)
def test_lengths_that_do_not_fit_into_each_other(kimi, capsys, lengths):
    assert main([*kimi, *(str(part) for key, value in lengths.items() for part in (f"--forecast.{key}", value))]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "do not fit into each other" in line


def test_finished_steps_are_counted_and_not_forecast(kimi, tmp_path, capsys):
    write_prepared(tmp_path / "runs/kimi/prepared", make_samples([10, 20, 30]))
    assert main(kimi) == 0
    out = capsys.readouterr().out
    assert f"samples            3 of 20 tokens, 0.0 M tokens (counted in {tmp_path}/runs/kimi/prepared)" in out
    assert "prepare            done" in out


def test_a_target_that_is_nowhere_is_an_error(kimi, capsys):
    assert main([*kimi, "--target.path", "nobody/unknown"]) == 4
    assert "nobody/unknown is no folder here, and the hub did not give its config.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"intermediate_size": None}, "has intermediate_size None, not a number"),
        ({"num_attention_heads": "many"}, "has num_attention_heads 'many', not a number"),
        ({"num_experts": 4}, "has no moe_intermediate_size"),
        ({"kv_lora_rank": 8}, "has no qk_nope_head_dim"),
        ({"quantization_config": {"config_groups": [1]}}, "is of an unknown form ('list' object has no attribute"),
        ({"quantization_config": {"ignore": ["re:*"], "bits": 4}}, "is of an unknown form (nothing to repeat"),
    ],
)
def test_a_configuration_that_says_too_little_is_named(tmp_path, capsys, change, said):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA | change))
    path = tmp_path / "run.toml"
    path.write_text(f'name = "x"\n[target]\npath = "{tmp_path}"\n[prepare]\nsources = ["none"]\n')
    assert main(["forecast", "--config", str(path)]) == 4
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / "config.json") in line
    assert said in line


def shapes_of(folder: Path, **target) -> Shapes:
    config = Run.model_validate({"name": "x", "target": {"path": str(folder), **target}, "prepare": {"sources": ["x"]}})
    return target_shapes(config.target)


def test_weights_of_kimi_are_computed_from_its_shapes():
    folder = Path("pipeline/forecast/recorded/moonshotai--Kimi-K2.5")
    weights = target_weights(shapes_of(folder))
    assert weights.total + 0.9e9 == pytest.approx(PUBLISHED_KIMI_BYTES, rel=0.001)
    assert 2e9 < weights.whole < 3e9, "router and the way down into latent attention"


@pytest.mark.parametrize("kind", ["llama", "deepseek"])
def test_computed_weights_are_those_of_the_files(kind, llama_folder, tmp_path):
    folder = llama_folder if kind == "llama" else save_tiny_deepseek(tmp_path / "deepseek")
    stated = target_weights(shapes_of(folder))
    assert stated.source == "its files' sizes"
    alone = tmp_path / "alone"
    alone.mkdir()
    (alone / "config.json").write_text((folder / "config.json").read_text())
    computed = target_weights(shapes_of(alone))
    assert computed.source == "computed from config.json"
    assert computed.total == pytest.approx(stated.total, rel=0.02)  # small: norms and headers are 1 %


def test_index_without_its_files_gives_the_size(tmp_path, llama_folder):
    (tmp_path / "config.json").write_text((llama_folder / "config.json").read_text())
    index = {"metadata": {"total_size": 12_345_678}, "weight_map": {"a": "model-00001.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    weights = target_weights(shapes_of(tmp_path))
    assert weights.total == 12_345_678
    assert weights.per_gpu(1) == 12_345_678
    assert weights.per_gpu(4) > 12_345_678 / 4, "what is beyond the text model is on every GPU"


def test_recorded_shapes_are_a_target_like_any_other():
    target = Target(shapes_of(Path("pipeline/forecast/recorded/moonshotai--Kimi-K2.5")).target.section)
    assert (target.num_layers, target.hidden_size, target.num_experts) == (61, 7168, 384)
