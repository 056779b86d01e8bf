"""The target of engine `reference`: latent attention, and a text model inside a wrapper."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from pipeline.config import TargetSection
from pipeline.errors import InputError
from pipeline.evaluate.reference import _load_text_model
from pipeline.target import Target
from tests.kimi.model import save_text_model, write_config


def load(folder: Path):
    return _load_text_model(Target(TargetSection(path=str(folder), dtype="float32")))


def test_the_text_model_comes_out_of_its_wrapper(kimi_folder: Path, tmp_path: Path):
    """The wrapper calls it kimi_k2, a name that transformers does not have."""
    alone = AutoModelForCausalLM.from_pretrained(save_text_model(kimi_folder, tmp_path), dtype=torch.float32)
    ids = torch.tensor([[3, 1, 4, 1, 5, 9, 2, 6]])
    with torch.no_grad():
        got, want = (model.eval()(ids).logits for model in (load(kimi_folder), alone))
    torch.testing.assert_close(got, want, atol=1e-3, rtol=0)


def test_latent_vectors_are_normed_as_vllm_norms_them(deepseek_folder: Path, kimi_folder: Path):
    """transformers does it with 1e-6, whatever rms_norm_eps (here 1e-5) says."""
    for folder in (deepseek_folder, kimi_folder):
        norms = [module for name, module in load(folder).named_modules() if name.endswith("_a_layernorm")]
        assert norms
        assert {norm.variance_epsilon for norm in norms} == {1e-5}


def test_quantised_weights_are_refused_before_a_model_is_built(tmp_path: Path):
    write_config(tmp_path, "bfloat16", quantization_config={"quant_method": "compressed-tensors"})
    with pytest.raises(InputError, match=r"are quantised, engine reference does not read them.*evaluate\.engine"):
        load(tmp_path)
