"""Where the target's shapes come from, in this order: its folder, the hub's cache, the hub, what is recorded here.

The hub is asked for the sizes of the weight files, and config.json is fetched (some kB, into the hub's cache).
"""

from dataclasses import dataclass
from pathlib import Path

from pipeline.config import TargetSection
from pipeline.errors import InputError
from pipeline.preflight.inputs import local_folder
from pipeline.target import Target, is_hub_name

RECORDED = Path(__file__).parent / "recorded"
"""OWNER--NAME/config.json: shapes of targets whose hub may be out of reach, with their source and date."""
HUB_TIMEOUT_S = 10.0


@dataclass(frozen=True)
class Shapes:
    """A target whose config.json can be read, where that came from, and the bytes of its weights if the hub said."""

    target: Target
    source: str
    weights_on_hub: int = 0


def target_shapes(section: TargetSection) -> Shapes:
    """Find them. Raises InputError for a target that is nowhere: no folder, unknown to the hub, not recorded."""
    folder = local_folder(section)
    if folder and (folder / "config.json").is_file():
        return Shapes(Target.at(section, folder), f"{folder}/config.json")
    if section.gguf or not is_hub_name(section.path):
        target = Target(section)
        return Shapes(target, str(target.folder))  # which raises, and says what to do
    try:
        return _from_hub(section)
    except InputError:
        recorded = RECORDED / section.path.replace("/", "--")
        if not recorded.is_dir():
            raise
        return Shapes(
            Target.at(section, recorded), f"{recorded.parent.parent.name}/recorded, as the hub did not give them"
        )


def _from_hub(section: TargetSection) -> Shapes:
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        info = HfApi().model_info(section.path, revision=section.revision, timeout=HUB_TIMEOUT_S, files_metadata=True)
        config = hf_hub_download(section.path, "config.json", revision=section.revision)
    except (HfHubHTTPError, OSError, ValueError) as error:
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise InputError(
            f"forecast: {section.path} is no folder here, and the hub did not give its config.json: {reason[:200]}"
        ) from None
    weights = sum(file.size or 0 for file in info.siblings or [] if file.rfilename.endswith(".safetensors"))
    return Shapes(Target.at(section, Path(config).parent), "its config.json on the hub", weights)
