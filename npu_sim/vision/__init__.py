"""Image classification: the ImageNet classes of a photograph, by a network that runs on a device."""

from npu_sim.vision.classifier import Classifier, Prediction, imagenet_classes
from npu_sim.vision.images import Preprocessing, load_image, preprocess, to_rgb
from npu_sim.vision.models import (
    EFFICIENTNET_LITE,
    MODELS,
    TORCHVISION,
    VisionModel,
    extract_model_ir,
    find_model,
    model_weights,
)

__all__ = [
    "EFFICIENTNET_LITE",
    "MODELS",
    "TORCHVISION",
    "Classifier",
    "Prediction",
    "Preprocessing",
    "VisionModel",
    "extract_model_ir",
    "find_model",
    "imagenet_classes",
    "load_image",
    "model_weights",
    "preprocess",
    "to_rgb",
]
