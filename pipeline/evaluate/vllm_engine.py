"""Engine `vllm`: vLLM decodes with the draft, then without, and its own counters are read."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from pipeline import engine
from pipeline.config import Run
from pipeline.errors import ConfigError, InputError
from pipeline.evaluate.counts import Counts, Outcome, Question
from pipeline.evaluate.vllm_decode import CANNOT_DRAFT
from pipeline.target import Target

ROOM_TOKENS = 16
"""Added to the longest answer: what is drafted past the end must fit the model length as well."""
CPU_SETTINGS = {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_MLA_DISABLE": "1",  # on a CPU, latent attention and the draft's ordinary one have no block size in common
}
"""What vLLM reads from the environment on a machine without GPU, where the user has not set it."""


class VllmEngine:
    """Serves the target with the draft, as `vllm serve --speculative-config` would."""

    def __init__(self, config: Run, target: Target, draft_folder: Path):
        self.config, self.target, self.draft_folder = config, target, draft_folder
        self.python = config.evaluate.python or sys.executable
        if config.evaluate.python is None and not _has_gpu():
            raise ConfigError(
                "evaluate: the installed vLLM cannot decode speculatively without a GPU. Set evaluate.engine to "
                "reference, or evaluate.python to the Python of an environment whose vLLM can"
            )
        engine.require_eagle3(target, "evaluate", config.evaluate.python)

    def answer(self, question: Question) -> Outcome:
        """Decode with and without the draft; `more` holds both speeds in tokens/s and whether the answers agree."""
        spec = {
            "method": "eagle3",
            "model": str(self.draft_folder.resolve()),
            "num_speculative_tokens": question.num_speculative_tokens,
        }
        drafted = self._decode(question, {"speculative_config": spec})
        counts = _counts(drafted["counters"], drafted["answers"], question.num_speculative_tokens)
        more: dict[str, Any] = {"vllm": drafted["vllm"], "tokens_per_second": _tokens_per_second(drafted)}
        if self.config.evaluate.baseline:
            plain = self._decode(question, {})
            more["tokens_per_second_without_draft"] = _tokens_per_second(plain)
            more["speedup"] = more["tokens_per_second"] / more["tokens_per_second_without_draft"]
            same = [a == b for a, b in zip(drafted["answers"], plain["answers"], strict=True)]
            more["answers_equal_without_draft"] = sum(same)
        return Outcome(counts, drafted["answers"], more)

    def _decode(self, question: Question, more: dict[str, Any]) -> dict[str, Any]:
        section = self.config.target
        longest = max(map(len, question.prompts)) + question.max_new_tokens + ROOM_TOKENS
        job = {
            "engine": {
                "model": str(self.target.folder.resolve()),
                "trust_remote_code": self.target.trust_remote_code,
                "dtype": section.dtype,
                "load_format": section.load_format,
                "tensor_parallel_size": section.tensor_parallel_size,
                "gpu_memory_utilization": section.gpu_memory_utilization,
                "max_model_len": longest,
                "max_num_seqs": self.config.evaluate.batch_size,
                "enable_prefix_caching": False,
                "disable_log_stats": False,
                "enforce_eager": self.config.evaluate.enforce_eager,
                "seed": question.seed,
                **({"limit_mm_per_prompt": limits} if (limits := self.target.text_only) else {}),
                **more,
            },
            "prompts": question.prompts,
            "stop_ids": question.stop_ids,
            "max_new_tokens": question.max_new_tokens,
            "temperature": question.temperature,
            "seed": question.seed,
        }
        with tempfile.TemporaryDirectory() as folder:
            job_file, result_file = Path(folder, "job.json"), Path(folder, "result.json")
            job_file.write_text(json.dumps(job))
            script = Path(__file__).with_name("vllm_decode.py")
            environment = {**({} if _has_gpu() else CPU_SETTINGS), **engine.given_environment()}
            try:
                done = subprocess.run([self.python, script, job_file, result_file], env=environment, check=False)
            except OSError as error:
                raise ConfigError(f"evaluate: evaluate.python {self.python} cannot be run ({error})") from None
            if done.returncode == CANNOT_DRAFT:
                raise InputError(
                    f"evaluate: {json.loads(result_file.read_text())['lacks']}. Set evaluate.python to an environment "
                    "whose vLLM does, or evaluate.engine to reference"
                )
            if done.returncode != 0:
                raise InputError(
                    f"evaluate: vLLM stopped with exit code {done.returncode}; its own message is above. "
                    "evaluate.engine reference needs no vLLM"
                )
            return json.loads(result_file.read_text())


def _counts(counters: list[dict[str, Any]], answers: list[list[int]], steps: int) -> list[Counts]:
    """Of each prompt, or of all together where vLLM decoded several at once."""
    lengths = list(map(len, answers))
    tokens = lengths if len(counters) == len(lengths) else [sum(lengths)]
    return [
        Counts(int(of["num_drafts"]), [int(n) for n in of["num_accepted_tokens_per_pos"] or [0] * steps], length)
        for of, length in zip(counters, tokens, strict=True)
    ]


def _tokens_per_second(result: dict[str, Any]) -> float:
    return sum(map(len, result["answers"])) / result["seconds"]


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
