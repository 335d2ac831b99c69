"""Text encoders: embedding models and cross-encoders in Hugging Face folders, compiled by `npu_sim.compile`."""

from typing import TYPE_CHECKING

from npu_compiler.deferred_import import deferred
from npu_sim.encoders.folder import CrossEncoderFolder, EmbedderFolder, EncoderFolder, read_encoder
from npu_sim.encoders.text import EncodedText, EncoderText

if TYPE_CHECKING:
    from npu_sim.encoders.model import TextEncoder

__getattr__ = deferred(__name__, {"TextEncoder": "model"})  # which imports PyTorch

__all__ = [
    "CrossEncoderFolder",
    "EmbedderFolder",
    "EncodedText",
    "EncoderFolder",
    "EncoderText",
    "TextEncoder",
    "read_encoder",
]
