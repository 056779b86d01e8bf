"""The image processor of the small Kimi-K2.5: loaded by vLLM, never asked, because only text goes through it."""

from transformers.image_processing_utils import BaseImageProcessor, BatchFeature


class KimiK25VisionProcessor(BaseImageProcessor):
    """Has the methods that vLLM calls on Kimi's."""

    model_type = "kimi_k25"
    num_frames_per_chunk = 4

    def __init__(self, media_proc_cfg: dict, **kwargs):
        super().__init__(**kwargs)
        self.media_proc_cfg = media_proc_cfg

    def media_tokens_calculator(self, media) -> int:
        """Tokens that an image or a chunk of video takes."""
        return 4

    def preprocess(self, medias, return_tensors=None) -> BatchFeature:
        """Raises ValueError: this copy of Kimi reads text."""
        raise ValueError("the small Kimi reads text only")
