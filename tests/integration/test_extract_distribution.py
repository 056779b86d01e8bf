"""The distribution that the draft is trained on is the one that the engine itself speaks from.

0.3.0 left out the target's final norm: the loss looked better and acceptance fell to nothing (1.07 of 4).
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pipeline.config import TargetSection
from pipeline.target import Target
from pipeline.train.loss import TargetHead
from tests.models import VOCAB_SIZE, Reference

pytest.importorskip("vllm")

ENGINE_LOGPROBS = """
import json, sys
import numpy as np
from pipeline.config import PrepareSection, Run, TargetSection
from pipeline.engine import start
from vllm import SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

out, vocab_size, prompts, *models = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), *sys.argv[4:]
for model in models:
    config = Run(name="x", prepare=PrepareSection(sources=["x"]), target=TargetSection(
        path=model, dtype="float32", max_length=512))
    llm = start(config, "extract", max_logprobs=vocab_size)
    wanted = SamplingParams(max_tokens=1, prompt_logprobs=vocab_size)
    answers = llm.generate([{"prompt_token_ids": ids} for ids in prompts], wanted, use_tqdm=False)
    rows = {str(n): answer.prompt_logprobs[1:] for n, answer in enumerate(answers)}
    arrays = {n: np.array([[row[i].logprob for i in range(vocab_size)] for row in of]) for n, of in rows.items()}
    np.savez(f"{out}/{model.rsplit('/', 1)[1]}.npz", **arrays)
    del llm
    cleanup_dist_env_and_memory()
"""


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.integers(0, 256, length).tolist() for length in (2, 60, 300)]


@pytest.fixture(scope="module")
def engine_logprobs(
    llama_folder: Path, deepseek_folder: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """llama.npz and deepseek.npz: for each prompt the engine's log-probabilities [S - 1, V] of what follows token p."""
    folder = tmp_path_factory.mktemp("logprobs")
    command = [sys.executable, "-c", ENGINE_LOGPROBS, str(folder), str(VOCAB_SIZE), json.dumps(prompts)]
    done = subprocess.run(
        [*command, str(llama_folder), str(deepseek_folder)],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.parametrize("model", ["llama", "deepseek"])
def test_training_targets_are_the_engines_distribution(
    model: str, engine_logprobs: Path, prompts: list[list[int]], request: pytest.FixtureRequest
):
    """softmax(lm_head(final_norm(last state))), as training computes it, against the engine's prompt log-probabilities.

    The last states are Hugging Face's, which test_extract_states shows to be the captured ones.
    """
    folder: Path = request.getfixturevalue(f"{model}_folder")
    reference = Reference(folder)
    head = Target(TargetSection(path=str(folder), dtype="float32")).head()
    target = TargetHead(head, torch.arange(VOCAB_SIZE), torch.device("cpu"))
    engine = np.load(engine_logprobs / f"{model}.npz")
    for number, ids in enumerate(prompts):
        assert reference.is_decisive(ids), "choose other prompts: a choice of experts hangs on rounding"
        last_SH = reference.states(ids)[reference.num_layers]
        want_SV = torch.from_numpy(engine[str(number)]).float()
        got_SV = target.probabilities(last_SH)[:-1].log()
        assert float((got_SV - want_SV).abs().max()) < 1e-3
        without_norm_SV = (last_SH @ head.lm_head_VH.T).log_softmax(-1)[:-1]
        assert float((without_norm_SV - want_SV).abs().max()) > 0.1, "the test would not see a missing norm"
