"""Encoders of texts: embedding models and cross-encoders of Hugging Face folders, compiled by `npu_sim.compile`."""

from npu_sim.encoders.folder import CrossEncoderFolder, EmbedderFolder, EncoderFolder, read_encoder
from npu_sim.encoders.model import TextEncoder
from npu_sim.encoders.text import EncodedText, EncoderText

__all__ = [
    "CrossEncoderFolder",
    "EmbedderFolder",
    "EncodedText",
    "EncoderFolder",
    "EncoderText",
    "TextEncoder",
    "read_encoder",
]
