"""Small tokenizers and chat templates for the tests of prepare: fast and slow, with and without reasoning."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>"]

CHATML = (  # SmolLM2's: adds a system turn where there is none
    "{% for m in messages %}{% if loop.first and m['role'] != 'system' %}<|im_start|>system\nBe kind<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
STRICT = (  # Llama 2's way: refuses roles that do not alternate
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
QWEN = (  # Qwen3's way: reasoning of turns before the last question is dropped
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and m.reasoning_content and loop.index0 > ns.last %}<think>\n"
    "{{ m.reasoning_content }}\n</think>\n\n{% endif %}{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CLOSED = (  # the generation prompt opens the reasoning, a finished conversation has it empty, all in one line
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['role'] == 'assistant' %}<think></think>{% endif %}"
    "{{ m['content'] }}<|im_end|>{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n<think>{% endif %}"
)
DEEPSEEK = (  # DeepSeek-R1's way: the finished rendering has neither reasoning nor its marks
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'].split('</think>')[-1] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
TRAILING = CHATML + "{% if not add_generation_prompt %}<|endoftext|>{% endif %}"  # Phi-3's way
TWISTED = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}{% if add_generation_prompt %}!!{% endif %}"


def fast_tokenizer(template: str = CHATML) -> PreTrainedTokenizerFast:
    """Byte-level, with merges, two of which span line ends: `\\n\\n` and `\\nH` are tokens.

    Like SmolLM2's it puts a token of its own before plain text, which must not happen to a rendered conversation.
    """
    words = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("Ċ", "Ċ"), ("Ċ", "H"), ("h", "e"), ("t", "he"), ("Ġ", "the")]
    words += [a + b for a, b in merges]
    tokenizer = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    start = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", start)]
    )
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = template
    return fast


class SlowTokenizer(PreTrainedTokenizer):
    """Python only, no offsets: UTF-8 bytes, and special tokens after them. As Kimi's, it can come with a model."""

    def __init__(self, **kwargs):
        kwargs.setdefault("eos_token", "<|im_end|>")
        kwargs.setdefault("additional_special_tokens", SPECIAL)
        super().__init__(**kwargs)

    @property
    def vocab_size(self) -> int:
        return 256

    def get_vocab(self) -> dict[str, int]:
        return {f"<{i}>": i for i in range(256)} | self.added_tokens_encoder

    def _tokenize(self, text: str, **kwargs) -> list[str]:
        return [f"<{byte}>" for byte in text.encode()]

    def _convert_token_to_id(self, token: str) -> int:
        return int(token[1:-1])

    def _convert_id_to_token(self, index: int) -> str:
        return f"<{index}>"

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return bytes(int(token[1:-1]) for token in tokens).decode(errors="replace")

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[()]:
        return ()


def slow_tokenizer(template: str = CHATML) -> SlowTokenizer:
    tokenizer = SlowTokenizer()
    tokenizer.chat_template = template
    assert not tokenizer.is_fast
    return tokenizer


def end_id(tokenizer) -> int:
    return tokenizer.convert_tokens_to_ids("<|im_end|>")
