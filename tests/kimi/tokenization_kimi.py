"""The tokenizer of a small Kimi-K2.5: code that comes with the model, as Kimi's does.

It has what makes Kimi's unlike others: it is slow (no offsets), byte pairs are tiktoken's, `encode` without further
arguments knows special tokens and with them goes another way, `apply_chat_template` has defaults of its own, and of the
added tokens only those that are named as special reach transformers: `<think>` and the tool markers do not.
"""

from pathlib import Path

import tiktoken
from tiktoken.load import load_tiktoken_bpe
from transformers import PreTrainedTokenizer

SPECIAL_TOKENS = 256
"""Ids after the ranks, most of them reserved."""

PIECES = r"\p{Han}+|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Merges do not go over the borders of these."""


class TikTokenTokenizer(PreTrainedTokenizer):
    """Ranks of `tiktoken.model`, then the special tokens of `added_tokens_decoder` and reserved ones between them."""

    vocab_files_names = {"vocab_file": "tiktoken.model"}  # noqa: RUF012  transformers' way to declare it
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012

    def __init__(self, vocab_file: str, added_tokens_decoder: dict | None = None, **kwargs):
        # added_tokens_decoder is not passed on, the harder case: transformers does not learn of <think>
        ranks = load_tiktoken_bpe(vocab_file)
        named = {int(i): str(token) for i, token in (added_tokens_decoder or {}).items()}
        ids = range(len(ranks), len(ranks) + SPECIAL_TOKENS)
        special = {named.get(i, f"<|reserved_token_{i}|>"): i for i in ids}
        self.vocab_file = vocab_file
        self.model = tiktoken.Encoding("kimi", pat_str=PIECES, mergeable_ranks=ranks, special_tokens=special)
        # latin-1 gives each byte a character, so that bytes of half a character are a token's text too
        self.decoder = {i: token.decode("latin-1") for token, i in ranks.items()} | {i: t for t, i in special.items()}
        self.encoder = {token: i for i, token in self.decoder.items()}
        super().__init__(**kwargs)

    @property
    def vocab_size(self) -> int:
        return self.model.n_vocab

    def get_vocab(self) -> dict[str, int]:
        return dict(self.encoder)

    def encode(self, text: str, allow_special_tokens: bool = True, **kwargs) -> list[int]:
        """Token ids. With transformers' arguments it is transformers' `encode`, which comes back here in parts."""
        if kwargs:
            return super().encode(text, **kwargs)
        if allow_special_tokens:
            return self.model.encode(text, allowed_special="all")
        return self.model.encode(text, disallowed_special=())

    def decode(self, token_ids: int | list[int], **kwargs) -> str:
        if kwargs:
            return super().decode(token_ids, **kwargs)
        return self.model.decode([token_ids] if isinstance(token_ids, int) else list(token_ids))

    def _tokenize(self, text: str, **kwargs) -> list[str]:
        return [self.decoder[i] for i in self.encode(text)]

    def _convert_token_to_id(self, token: str) -> int:
        return self.encoder[token]

    def _convert_id_to_token(self, index: int) -> str:
        return self.decoder[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return "".join(tokens).encode("latin-1").decode(errors="replace")

    @staticmethod
    def clean_up_tokenization(out_string: str) -> str:
        return out_string

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str]:
        out = Path(save_directory) / f"{filename_prefix + '-' if filename_prefix else ''}tiktoken.model"
        if out.resolve() != Path(self.vocab_file).resolve():
            out.write_bytes(Path(self.vocab_file).read_bytes())
        return (str(out),)

    def apply_chat_template(
        self, conversation, tools=None, tokenize=False, add_generation_prompt=True, thinking=True, **kwargs
    ):
        """Text with a generation prompt where nothing else is asked for; keys of tools are sorted."""
        more = {"tokenize": tokenize, "add_generation_prompt": add_generation_prompt, "thinking": thinking}
        return super().apply_chat_template(conversation, tools=_sorted(tools), **more, **kwargs)


def _sorted(value):
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    return [_sorted(item) for item in value] if isinstance(value, list) else value
