"""The draft and its loss against a slow, plain reference: every (start, step) alone, as decoding runs it."""

from pathlib import Path

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from pipeline.config import TargetSection, TrainSection
from pipeline.errors import ConfigError
from pipeline.target import Head, Target
from pipeline.train.data import Row
from pipeline.train.draft import Draft, draft_config
from pipeline.train.loss import TargetHead, unroll
from tests.training import AUX_LAYERS

STEPS, WORDS = 3, 40


@pytest.fixture(scope="module")
def target(llama_folder: Path) -> Target:
    return Target(TargetSection(path=str(llama_folder), dtype="float32"))


def make_draft(target: Target, **section) -> Draft:
    config = draft_config(target, TrainSection(**section), list(AUX_LAYERS), WORDS)
    draft = Draft(config, target.head().embedding_VH)
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.uniform_(0.5, 1.5) if parameter.dim() == 1 else parameter.normal_(0, 0.1)
    return draft


def random_row(hidden: int, documents: list[tuple[int, int]], length: int) -> Row:
    generator = torch.Generator().manual_seed(2)
    row = Row(
        torch.randint(0, 256, (length,), generator=generator),
        torch.zeros(length, dtype=torch.long),
        torch.full((length,), -1),
        torch.zeros(length, dtype=torch.bool),
        torch.randn(length, 3, hidden, generator=generator),
        torch.randn(length, hidden, generator=generator),
        documents,
    )
    for number, (start, end) in enumerate(documents):
        row.positions_R[start:end] = torch.arange(end - start)
        row.document_R[start:end] = number
        row.supervised_R[start + 3 : end - 1] = True
    return row


def decoded(draft: Draft, row: Row, start: int, end: int, p: int, steps: int) -> list[torch.Tensor]:
    """Logits of `steps` draft steps from index p of one document, token by token with a growing cache."""
    layer, attention, config = draft.layers[0], draft.layers[0].self_attn, draft.config
    groups, width = config.num_attention_heads // config.num_key_value_heads, config.head_dim

    def norm(weight, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + config.rms_norm_eps) * weight

    def rotate(x, position):
        angles = position / config.rope_theta ** (torch.arange(0, width, 2) / width)
        cos, sin = angles.cos().repeat(2), angles.sin().repeat(2)
        return x * cos + torch.cat([-x[..., width // 2 :], x[..., : width // 2]], -1) * sin

    def one(token, hidden, position, cache):
        normed = norm(layer.hidden_norm.weight, hidden)
        x = torch.cat([norm(layer.input_layernorm.weight, draft.embedding_VH[token]), normed])
        query = rotate(attention.q_proj(x).view(-1, width), position)
        cache.append((rotate(attention.k_proj(x).view(-1, width), position), attention.v_proj(x).view(-1, width)))
        keys, values = (torch.stack(t).repeat_interleave(groups, 1) for t in zip(*cache, strict=True))
        weights = torch.einsum("nd,snd->ns", query, keys).div(width**0.5).softmax(-1)
        mixed = torch.einsum("ns,snd->nd", weights, values).flatten()
        residual = (normed if config.norm_before_residual else hidden) + attention.o_proj(mixed)
        x = norm(layer.post_attention_layernorm.weight, residual)
        return residual + layer.mlp["down_proj"](F.silu(layer.mlp["gate_proj"](x)) * layer.mlp["up_proj"](x))

    cache: list = []
    for index in range(start, p + 1):  # step 0 of all earlier indices fills the cache
        hidden = one(row.tokens_R[index + 1], draft.fc(row.aux_RLH[index].flatten()), index - start, cache)
    logits = []
    for step in range(steps):
        if step:
            hidden = one(row.tokens_R[p + 1 + step], hidden, p - start + step, cache)
        logits.append(draft.lm_head(norm(draft.norm.weight, hidden)))
    return logits


@pytest.mark.parametrize("norm_before_residual", [True, False])
def test_unrolled_steps_equal_decoding_one_token_at_a_time(target, norm_before_residual):
    """Masks, positions, rotations, the residual: a mistake in any of them is another number here."""
    draft = make_draft(target, norm_before_residual=norm_before_residual)
    documents = [(0, 9), (9, 20)]
    row = random_row(target.hidden_size, documents, 24)
    chain = draft.begin(row.aux_RLH, row.positions_R, row.documents)
    for step in range(STEPS):
        tokens = F.pad(row.tokens_R[step + 1 :], (0, step + 1))
        logits_RD = draft.logits(draft.advance(chain, tokens))
        for start, end in documents:
            for p in range(start, end - 1 - step):
                want = decoded(draft, row, start, end, p, step + 1)[step]
                torch.testing.assert_close(logits_RD[p], want, rtol=1e-4, atol=1e-4)


def test_loss_equals_its_definition(target):
    """Which target belongs to which index, the final norm, the mask: EAGLE-3's definition, written out."""
    draft = make_draft(target)
    row = random_row(target.hidden_size, [(0, 9), (9, 20)], 24)
    head, kept_D = target.head(), torch.arange(WORDS) * 3
    sums = unroll(draft, TargetHead(head, kept_D, torch.device("cpu")), row, STEPS, None, exact=True)
    for step in range(STEPS):
        loss, count = 0.0, 0
        for start, end in row.documents:
            for p in range(start, end):
                j = p + 1 + step  # the position whose last state is the target; it predicts the token after it
                if j + 1 >= end or not row.supervised_R[j]:
                    continue
                logits = decoded(draft, row, start, end, p, step + 1)[step]
                loss -= float((probabilities(head, row.last_RH[j], kept_D) * logits.log_softmax(-1)).sum().detach())
                count += 1
        assert count == int(sums.count[step])
        assert float(sums.loss[step].detach()) == pytest.approx(loss, rel=1e-4)


def probabilities(head: Head, last_H: torch.Tensor, kept_D: torch.Tensor) -> torch.Tensor:
    normed = last_H * torch.rsqrt(last_H.pow(2).mean() + head.rms_norm_eps) * head.norm_H
    return (head.lm_head_VH[kept_D] @ normed).softmax(-1)


def test_noise_leaves_the_targets_alone(target):
    """0.3.0 added the noise to the states that the targets come from, too."""
    draft, row = make_draft(target), random_row(target.hidden_size, [(0, 20)], 20)
    head = TargetHead(target.head(), torch.arange(WORDS), torch.device("cpu"))
    before = row.last_RH.clone()
    noise = torch.rand_like(row.aux_RLH)
    noisy, plain = (unroll(draft, head, row, 1, n, exact=False) for n in (noise, None))
    assert torch.equal(row.last_RH, before)
    assert not torch.equal(noisy.loss, plain.loss)


def test_softmax_and_loss_are_float32_under_autocast(target):
    """0.3.0 took softmax and log-softmax in bfloat16: 7.5 % of acceptance length."""
    draft, row = make_draft(target), random_row(target.hidden_size, [(0, 20)], 20)
    head = TargetHead(target.head(), torch.arange(WORDS), torch.device("cpu"))
    with torch.autocast("cpu", torch.bfloat16):
        assert head.probabilities(row.last_RH).dtype == torch.float32
        chain = draft.begin(row.aux_RLH, row.positions_R, row.documents)
        hidden_RH = draft.advance(chain, row.tokens_R)
        assert hidden_RH.dtype == torch.float32, "the residual stream"
        assert draft.logits(hidden_RH).dtype == torch.float32
        assert unroll(draft, head, row, 2, None, exact=False).loss.dtype == torch.float32


def test_initial_weights_are_seeded_and_none_is_left_uninitialised(target):
    """0.3.0 left RMSNorm weights as whatever was in memory under torchrun."""
    head = target.head()
    config = draft_config(target, TrainSection(), list(AUX_LAYERS), WORDS)
    drafts = []
    for _ in range(2):
        draft = Draft(config, head.embedding_VH)
        with torch.no_grad():
            for parameter in draft.parameters():
                parameter.fill_(float("nan"))
        draft.initialise(7, head.norm_H, head.lm_head_VH[:WORDS])
        drafts.append(draft)
    for (name, one), other in zip(drafts[0].named_parameters(), drafts[1].parameters(), strict=True):
        assert torch.equal(one, other), name
        assert one.isfinite().all(), name
    assert torch.equal(drafts[0].norm.weight, head.norm_H)


def test_the_draft_inherits_rope_head_width_and_eps(target):
    """0.3.0 carried none of them: another rope_theta cost 0.1 of acceptance length."""
    target.config["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    try:
        config = draft_config(target, TrainSection(), list(AUX_LAYERS), WORDS)
    finally:
        target.config["rope_scaling"] = None
    assert config.rope_theta == 50000.0
    assert config.rope_scaling["factor"] == 2.0
    assert (config.head_dim, config.num_attention_heads, config.num_key_value_heads) == (32, 4, 2)
    assert config.rms_norm_eps == 1e-5
    assert config.eagle_aux_hidden_state_layer_ids == list(AUX_LAYERS)


def test_heads_that_do_not_divide_are_an_error_of_the_config(target):
    with pytest.raises(ConfigError, match="num_attention_heads 4 is not a multiple of num_key_value_heads 3"):
        draft_config(target, TrainSection(num_key_value_heads=3), list(AUX_LAYERS), WORDS)
