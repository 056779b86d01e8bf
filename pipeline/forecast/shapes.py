"""Where the target's shapes come from, in this order: its folder, the hub's cache, the hub, what is recorded here.

Of a target on the hub only config.json and the index of its weights are fetched: 20 kB and, for Kimi-K2.5, some MB.
"""

from pathlib import Path

from pipeline.config import TargetSection
from pipeline.errors import InputError
from pipeline.preflight.inputs import is_hub_name, local_folder
from pipeline.target import Target

RECORDED = Path(__file__).parent / "recorded"
"""OWNER--NAME/config.json: shapes of targets whose hub may be out of reach, with their source and date."""
INDEX = "model.safetensors.index.json"


def target_shapes(section: TargetSection) -> tuple[Target, str]:
    """A target whose config.json can be read, and where that came from.

    Raises InputError for a target that is nowhere: no folder, no name that the hub knows, nothing recorded.
    """
    folder = local_folder(section)
    if folder and (folder / "config.json").is_file():
        return _at(section, folder), str(folder)
    if section.gguf or not is_hub_name(section.path):
        return Target(section), Target(section).folder.name  # raises, saying what to do
    try:
        return _at(section, _fetched(section)), "its config.json on the Hugging Face hub"
    except InputError as error:
        recorded = RECORDED / section.path.replace("/", "--")
        if not recorded.is_dir():
            raise
        return _at(section, recorded), f"recorded in pipeline/forecast, since {error}"


def _fetched(section: TargetSection) -> Path:
    """The hub's cache folder with config.json, and with the index of the weights if the model has one."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    try:
        config = hf_hub_download(section.path, "config.json", revision=section.revision)
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(f"the hub did not give {section.path}'s config.json ({reason[:100]})") from None
    try:
        hf_hub_download(section.path, INDEX, revision=section.revision)
    except (EntryNotFoundError, HfHubHTTPError, OSError, ValueError):
        pass  # a model of one file has none; the size is computed then
    return Path(config).parent


def _at(section: TargetSection, folder: Path) -> Target:
    """A Target that need not ask the hub where it lies."""
    return Target(section.model_copy(update={"path": str(folder)}))
