"""Kimi-K2.5 from its tokenizer to a served draft, on a small copy with random weights (tests/kimi/).

The whole chain by the command line's own steps, with a draft that learns the target's few answers by heart; then what
it comes to in an engine that is not ours: without a GPU vLLM 0.32's CPU build, with one the installed vLLM.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pipeline import evaluate, extract, prepare, train, vocab
from pipeline.config import Run, load
from pipeline.extract import engines
from pipeline.store.samples import read_samples
from pipeline.store.states import StatesReader
from pipeline.target import Target
from pipeline.train.draft import Draft, draft_config
from tests.kimi.model import AUX_LAYERS, HIDDEN, NUM_LAYERS, pinned, save_text_model
from tests.kimi.tokenizer import BOS
from tests.models import Reference, max_relative_error
from tests.training import write_config

pytest.importorskip("vllm")

ON_GPU = torch.cuda.is_available()
DTYPE = "bfloat16" if ON_GPU else "float32"
SERVE_PYTHON = Path(__file__).parents[2] / ".venv-serve" / "bin" / "python"
MIDDLE, THINK = BOS + 17, BOS + 22
QUESTIONS = [
    [{"role": "user", "content": "Where is the harbour?"}],
    [{"role": "system", "content": "You are a sailor."}, {"role": "user", "content": "How high are the waves?"}],
    [
        {"role": "user", "content": "Who is on board?"},
        {"role": "assistant", "content": "<think>Count them.</think>Three."},
        {"role": "user", "content": "And now?"},
    ],
    [{"role": "user", "content": [{"type": "text", "text": "Name a wind. "}, {"type": "text", "text": "One."}]}],
    [{"role": "user", "content": "風は強いですか?"}],
    [{"role": "user", "content": "W" * 40}],
]


def write_run(folder: Path, kimi_folder: Path) -> Run:
    """A run on the questions, which it is also evaluated on."""
    folder.mkdir(parents=True, exist_ok=True)
    questions = folder / "questions.jsonl"
    questions.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in QUESTIONS))
    sections = {
        "target": pinned(kimi_folder) | {"dtype": DTYPE, "gpu_memory_utilization": 0.3},
        # random weights say other things for the least difference: answers are made as they are evaluated, eagerly
        "prepare": {"sources": [str(questions)], "max_new_tokens": 48, "enforce_eager": True},
        "extract": {"aux_layers": AUX_LAYERS},
        "vocab": {"draft_vocab_size": 640},
        "train": {"epochs": 60, "learning_rate": 2e-3, "validation_share": 0.0, "head_dim": 64},
        "evaluate": {
            "prompts": [str(questions)],
            "max_new_tokens": 44,
            "batch_size": len(QUESTIONS),
            "enforce_eager": True,
            "baseline": False,
        },
    }
    if not ON_GPU:
        sections["evaluate"]["python"] = str(SERVE_PYTHON)
    return load(write_config(folder / "run.toml", kimi_folder, **sections))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, kimi_folder: Path) -> Run:
    """Steps 1 to 4, done."""
    config = write_run(tmp_path_factory.mktemp("kimi"), kimi_folder)
    for step in (prepare, extract, vocab, train):
        step.run(config)
    return config


def test_the_target_answers_and_its_own_ids_are_kept(run: Run):
    """What is supervised is what the target sampled after `<think>`, to `<|im_end|>`; nothing was tokenised again."""
    samples, ends = list(read_samples(run.folder("prepared"))), Target(run.target).end_of_turn_ids
    assert len(samples) == len(QUESTIONS)
    for sample in samples:
        ids, mask = sample.input_ids_S.tolist(), sample.loss_mask_S.tolist()
        start = mask.index(True)
        assert all(mask[start:])
        assert not any(mask[:start])
        assert ids[start - 1] == THINK
        assert MIDDLE in ids[start - 8 : start]
        answer = ids[start:]
        assert not set(ends) & set(answer[:-1])
        assert len(answer) == run.prepare.max_new_tokens or answer[-1] in ends


def test_states_are_those_of_the_text_model(run: Run, kimi_folder: Path, tmp_path: Path):
    """Out of the wrapper, at vLLM's layer ids: aux 2, the middle, the last but two, and the last state un-normed.

    In bfloat16 some tokens go to other experts: there half of the rows are near, and nearer than to any other layer's.
    """
    reader = StatesReader(run.folder("hidden"))
    assert reader.manifest.totals["aux_layers"] == AUX_LAYERS
    reference = Reference(save_text_model(kimi_folder, tmp_path))
    for number in range(len(QUESTIONS)):
        sample = reader.read(number)
        states = reference.states(sample.input_ids_S.tolist())
        captured = [*sample.aux_states_SLH.unbind(1), sample.last_states_SH]
        for layer, got_SH in zip([*AUX_LAYERS, NUM_LAYERS], captured, strict=True):
            assert got_SH.shape == states[layer].shape
            if ON_GPU:
                errors = {other: median_error(got_SH, state_SH) for other, state_SH in states.items()}
                assert min(errors, key=errors.__getitem__) == layer
                assert errors[layer] < 0.4, f"layer {layer}"
            else:
                assert max_relative_error(got_SH, states[layer]) < 1e-4


def median_error(got_SH: torch.Tensor, want_SH: torch.Tensor) -> float:
    """Of the rows, each by its largest difference as a share of its largest value."""
    return float(((got_SH.float() - want_SH).abs().amax(-1) / want_SH.abs().amax(-1)).median())


def test_the_drafts_configuration_is_that_of_public_kimi_drafts(run: Run):
    """A Llama layer as wide as the target, its heads, its eps, its rope (but see the next test), the aux ids."""
    written = json.loads((run.folder("checkpoints") / "best" / "config.json").read_text())
    assert written["architectures"] == ["LlamaForCausalLMEagle3"]
    assert written["num_hidden_layers"] == 1
    assert (written["hidden_size"], written["target_hidden_size"]) == (HIDDEN, HIDDEN)
    assert (written["num_attention_heads"], written["num_key_value_heads"], written["head_dim"]) == (2, 2, 64)
    assert (written["rms_norm_eps"], written["rope_theta"]) == (1e-5, 50000.0)
    assert written["rope_scaling"]["factor"] == 64.0
    assert (written["vocab_size"], written["draft_vocab_size"]) == (768, 640)
    assert written["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == AUX_LAYERS


def test_a_draft_for_latent_attention_has_heads_of_128(run: Run):
    section = run.train.model_copy(update={"head_dim": None})
    assert draft_config(Target(run.target), section, AUX_LAYERS, 640).head_dim == 128


ROPE = """
import sys
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.transformers_utils.config import get_config
with set_current_vllm_config(VllmConfig()):
    config = get_config(sys.argv[1], trust_remote_code=False)
    rope = get_rope(config.head_dim, config.max_position_embeddings, rope_parameters=config.rope_parameters,
                    dtype=torch.float32)
torch.save(rope.cos_sin_cache.cpu(), sys.argv[2])
"""


@pytest.mark.parametrize("python", [None, pytest.param(SERVE_PYTHON, id="later")])
def test_the_draft_turns_by_the_same_angles_in_training_and_in_vllm(run: Run, tmp_path: Path, python: Path | None):
    """Kimi's own yarn with its mscale keys: vLLM 0.16 makes the vectors 1.4 times as long as transformers does."""
    if python is not None and not python.exists():
        pytest.skip(f"{python} is missing: `make test` makes it")
    folder = run.folder("checkpoints") / "best"
    subprocess.run([python or sys.executable, "-c", ROPE, folder, tmp_path / "rope.pt"], check=True)
    cache = torch.load(tmp_path / "rope.pt", weights_only=True)
    target = Target(run.target)
    config = draft_config(target, run.train, AUX_LAYERS, 640)
    cos, sin = Draft(config, torch.zeros(1, HIDDEN)).rotary(torch.zeros(1), torch.arange(4096)[None])
    half = run.train.head_dim // 2
    assert torch.allclose(cache[:4096, :half], cos[0, :, :half], atol=1e-4)
    assert torch.allclose(cache[:4096, half:], sin[0, :, :half], atol=1e-4)


@pytest.mark.skipif(not ON_GPU and not SERVE_PYTHON.exists(), reason=f"{SERVE_PYTHON} is missing: `make test` makes it")
def test_what_was_memorised_is_accepted_by_vllm(run: Run):
    """The draft as it is, on the target in its wrapper, in an engine's own counters."""
    evaluate.run(run)
    summary = json.loads((run.folder("evaluation") / "summary.json").read_text())
    assert summary["engine"] == "vllm"
    assert summary["acceptance_length"] > 3.5
    if ON_GPU:
        return
    reference = run.model_copy(update={"evaluate": run.evaluate.model_copy(update={"engine": "reference"})})
    run.folder("evaluation").rename(run.folder("evaluation").with_name("by-vllm"))
    evaluate.run(reference)
    exact = json.loads((run.folder("evaluation") / "summary.json").read_text())
    assert summary["num_drafts"] == exact["num_drafts"]
    assert summary["num_accepted_tokens_per_pos"] == exact["num_accepted_tokens_per_pos"]


@pytest.mark.skipif(ON_GPU and torch.cuda.device_count() < 2, reason="needs a second GPU")
def test_two_gpus_that_share_the_target_give_the_same_states(
    run: Run, kimi_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Tensor parallel 2, heads and experts cut in two, in float32. (On a CPU: two processes.)"""
    if ON_GPU:
        monkeypatch.setenv("VLLM_MLA_DISABLE", "1")  # kernels for latent attention have no float32
    samples = list(read_samples(run.folder("prepared")))
    target = run.target.model_copy(update={"tensor_parallel_size": 2, "dtype": "float32"})
    extract = run.extract.model_copy(update={"engine": "speculators"})
    config = run.model_copy(update={"target": target, "extract": extract})
    engine = engines.start(config, Target(target), [*AUX_LAYERS, NUM_LAYERS])
    try:
        captured = list(engine.capture([samples]))
    finally:
        engine.close()
    reference = Reference(save_text_model(kimi_folder, tmp_path))
    states = [reference.states(sample.input_ids_S.tolist()) for sample in samples]
    for slot, layer in enumerate([*AUX_LAYERS, NUM_LAYERS]):
        for result, wanted in zip(captured, states, strict=True):
            if ON_GPU:  # whose products are coarser in float32
                assert median_error(result.states_LSH[slot], wanted[layer]) < 0.02
            else:
                assert max_relative_error(result.states_LSH[slot], wanted[layer]) < 1e-4
