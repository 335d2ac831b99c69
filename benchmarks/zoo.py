"""Models of the benchmarks: configurations of transformers and timm, and parts of diffusion models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IMAGE = (3, 224, 224)
TOKENS = 30000  # smaller than the vocabularies of the models below


@dataclass(frozen=True)
class Entry:
    """A model and the inputs with which it is measured.

    Attributes:
        title: Name in the table.
        make: Creates the module, with random weights in float32.
        shapes: Shape of one element of the batch, for each input.
        many: The larger of the two batch sizes.
        vocabulary: Number of token ids that the inputs are drawn from; 0 where they are float32.
    """

    title: str
    make: Callable[[], nn.Module]
    shapes: tuple[tuple[int, ...], ...]
    many: int = 32
    vocabulary: int = 0

    def inputs(self, batch: int, seed: int, device: str = "cpu") -> list[Tensor]:
        """Return random inputs: float32 from a normal distribution, or int64 token ids."""
        generator = torch.Generator().manual_seed(seed)
        if self.vocabulary:
            tensors = [torch.randint(self.vocabulary, (batch, *shape), generator=generator) for shape in self.shapes]
        else:
            tensors = [torch.randn(batch, *shape, generator=generator) for shape in self.shapes]
        return [each.to(device) for each in tensors]


class Only(nn.Module):
    """A model of transformers that returns one tensor.

    Args:
        output: The field of the result to return.
        arguments: The keywords that the input is passed as.
    """

    def __init__(self, model: nn.Module, output: str, *arguments: str, **settings: Any) -> None:
        super().__init__()
        self.model, self.output, self.arguments, self.settings = model, output, arguments, settings

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.model(**dict.fromkeys(self.arguments, x), **self.settings)[self.output]
        return result


class UNetBlock(nn.Module):
    """A residual block and a transformer block as in the UNet of Stable Diffusion.

    Args:
        channels: Channels of the activations, which are [N, channels, H, W].
        heads: Heads of the attention over all pixels and over the text.
    """

    def __init__(self, channels: int, heads: int, embedding: int = 1280, text: int = 768) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.GroupNorm(32, channels) for _ in range(3)])
        self.convolutions = nn.ModuleList([nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2)])
        self.time = nn.Linear(embedding, channels)
        self.proj_in, self.proj_out = (nn.Conv2d(channels, channels, 1) for _ in range(2))
        self.layer_norms = nn.ModuleList([nn.LayerNorm(channels) for _ in range(3)])
        self.queries = nn.ModuleList([nn.Linear(channels, channels, bias=False) for _ in range(2)])
        self.keys = nn.ModuleList([nn.Linear(width, channels, bias=False) for width in (channels, text)])
        self.values = nn.ModuleList([nn.Linear(width, channels, bias=False) for width in (channels, text)])
        self.outs = nn.ModuleList([nn.Linear(channels, channels) for _ in range(2)])
        self.gated = nn.Linear(channels, 8 * channels)
        self.down = nn.Linear(4 * channels, channels)

    def forward(self, x: Tensor, time: Tensor, text: Tensor) -> Tensor:
        """Map x [N, channels, H, W], time [N, embedding] and text [N, tokens, text] to a tensor of the shape of x."""
        first, second = self.convolutions
        hidden = first(F.silu(self.norms[0](x))) + self.time(F.silu(time))[:, :, None, None]
        x = x + second(F.silu(self.norms[1](hidden)))
        tokens = self.proj_in(self.norms[2](x)).flatten(2).transpose(1, 2)
        normed = self.layer_norms[0](tokens)
        tokens = tokens + self._attend(0, normed, normed)
        tokens = tokens + self._attend(1, self.layer_norms[1](tokens), text)
        value, gate = self.gated(self.layer_norms[2](tokens)).chunk(2, -1)
        tokens = tokens + self.down(value * F.gelu(gate))
        result: Tensor = x + self.proj_out(tokens.transpose(1, 2).reshape(x.shape))
        return result

    def _attend(self, number: int, tokens: Tensor, others: Tensor) -> Tensor:
        q, k, v = (
            project[number](source).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project, source in ((self.queries, tokens), (self.keys, others), (self.values, others))
        )
        attended: Tensor = self.outs[number](F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return attended


class DiffusionBlocks(nn.Module):
    """Blocks of the diffusion transformer DiT: attention and an MLP, scaled and shifted by a conditioning vector.

    Args:
        width: Features of a token.
        heads: Heads of the attention; DiT-XL's 16 heads are 72 wide.
        depth: Number of blocks.
    """

    def __init__(self, width: int = 1152, heads: int = 16, depth: int = 4) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False, eps=1e-6)
        self.modulations = nn.ModuleList([nn.Linear(width, 6 * width) for _ in range(depth)])
        self.qkv = nn.ModuleList([nn.Linear(width, 3 * width) for _ in range(depth)])
        self.projections = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.mlps = nn.ModuleList(
            [
                nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(approximate="tanh"), nn.Linear(4 * width, width))
                for _ in range(depth)
            ]
        )

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """Map tokens x [N, tokens, width] and a vector [N, width] to a tensor of the shape of x."""
        for modulation, qkv, projection, mlp in zip(
            self.modulations, self.qkv, self.projections, self.mlps, strict=True
        ):
            shift, scale, gate, shift2, scale2, gate2 = modulation(F.silu(condition))[:, None].chunk(6, -1)
            q, k, v = qkv(self.norm(x) * (1 + scale) + shift).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            x = x + gate * projection(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            x = x + gate2 * mlp(self.norm(x) * (1 + scale2) + shift2)
        return x


class BidirectionalLSTM(nn.Module):
    """Two layers of LSTM in both directions, 512 features each, over a batch of sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(512, 512, 2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        """Map x [N, steps, 512] to the hidden states [N, steps, 1024]."""
        states: Tensor = self.lstm(x)[0]
        return states


def _transformers(kind: str, config: str, output: str, argument: str, **settings: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        model = getattr(transformers, kind)(getattr(transformers, config)(**settings))
        return Only(model, output, argument)

    return make


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return Only(GPT2LMHeadModel(GPT2Config()), "logits", "input_ids", use_cache=False)


def _whisper() -> nn.Module:
    from transformers import WhisperConfig
    from transformers.models.whisper.modeling_whisper import WhisperEncoder

    config = WhisperConfig(
        d_model=768, encoder_layers=12, encoder_attention_heads=12, encoder_ffn_dim=3072, num_mel_bins=80
    )
    return Only(WhisperEncoder(config), "last_hidden_state", "input_features")


def timm_model(name: str) -> Callable[[], nn.Module]:
    """Return a function that creates a model of timm."""

    def make() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name)
        return model

    return make


_IMAGES = {"output": "logits", "argument": "pixel_values"}
_PIXELS = {"output": "last_hidden_state", "argument": "pixel_values"}
_HIDDEN = {"output": "last_hidden_state", "argument": "input_ids"}
_UNET = ((320, 64, 64), (1280,), (77, 768))

ENTRIES = {
    "convnext": Entry(
        "ConvNeXt-T", _transformers("ConvNextForImageClassification", "ConvNextConfig", **_IMAGES), (IMAGE,)
    ),
    "efficientnet": Entry(
        "EfficientNet-B0",
        _transformers(
            "EfficientNetForImageClassification",
            "EfficientNetConfig",
            **_IMAGES,
            image_size=224,
            width_coefficient=1.0,
            depth_coefficient=1.0,
            hidden_dim=1280,
        ),
        (IMAGE,),
    ),
    "mobilenet": Entry(
        "MobileNetV2", _transformers("MobileNetV2ForImageClassification", "MobileNetV2Config", **_IMAGES), (IMAGE,)
    ),
    "resnext": Entry("ResNeXt-50, 32 groups of 4 and more", timm_model("resnext50_32x4d"), (IMAGE,), 16),
    "regnety": Entry("RegNetY-16GF, groups of 112", timm_model("regnety_160"), (IMAGE,), 16),
    "swin": Entry("Swin-T", _transformers("SwinForImageClassification", "SwinConfig", **_IMAGES), (IMAGE,)),
    "segformer": Entry(
        "SegFormer-B0, 512 × 512",
        _transformers("SegformerForSemanticSegmentation", "SegformerConfig", **_IMAGES),
        ((3, 512, 512),),
        16,
    ),
    "vit": Entry("ViT-B/16", _transformers("ViTForImageClassification", "ViTConfig", **_IMAGES), (IMAGE,)),
    "unet": Entry("UNet block, 8 heads of 40", lambda: UNetBlock(320, 8), _UNET, 16),
    "unet64": Entry("UNet block, 5 heads of 64", lambda: UNetBlock(320, 5), _UNET, 16),
    "bert": Entry(
        "BERT-base, 128 tokens", _transformers("BertModel", "BertConfig", **_HIDDEN), ((128,),), 16, vocabulary=TOKENS
    ),
    "t5": Entry(
        "T5-base encoder, 128 tokens",
        _transformers(
            "T5EncoderModel", "T5Config", **_HIDDEN, d_model=768, d_ff=3072, num_layers=12, num_heads=12, d_kv=64
        ),
        ((128,),),
        16,
        vocabulary=TOKENS,
    ),
    "gpt2": Entry("GPT-2 prefill, 512 tokens", _gpt2, ((512,),), 16, vocabulary=TOKENS),
    "whisper": Entry("Whisper-small encoder, 30 s", _whisper, ((80, 3000),), 16),
    "eva02": Entry("EVA02-S/14", timm_model("eva02_small_patch14_224"), (IMAGE,), 16),
    "deberta": Entry(
        "DeBERTa-v2-base, 128 tokens",
        _transformers(
            "DebertaV2Model",
            "DebertaV2Config",
            **_HIDDEN,
            hidden_size=768,
            num_hidden_layers=12,
            num_attention_heads=12,
            intermediate_size=3072,
            relative_attention=True,
            position_buckets=256,
            pos_att_type=["p2c", "c2p"],
            norm_rel_ebd="layer_norm",
            share_att_key=True,
            position_biased_input=False,
        ),
        ((128,),),
        16,
        vocabulary=TOKENS,
    ),
    "lstm": Entry("LSTM, 2 layers, both directions, 128 steps", BidirectionalLSTM, ((128, 512),), 8),
    "dit": Entry("DiT-XL, 4 blocks, 16 heads of 72", DiffusionBlocks, ((256, 1152), (1152,)), 2),
    "clip": Entry(
        "CLIP ViT-L/14",
        _transformers(
            "CLIPVisionModel",
            "CLIPVisionConfig",
            **_PIXELS,
            hidden_size=1024,
            intermediate_size=4096,
            num_hidden_layers=24,
            num_attention_heads=16,
            patch_size=14,
        ),
        (IMAGE,),
        8,
    ),
    "deit3": Entry("DeiT3-B/16", timm_model("deit3_base_patch16_224"), (IMAGE,)),
    "dinov2": Entry(
        "DINOv2-B/14", _transformers("Dinov2Model", "Dinov2Config", **_PIXELS, image_size=224), (IMAGE,), 16
    ),
    "wav2vec2": Entry(
        "wav2vec 2.0 base, 5 s",
        _transformers("Wav2Vec2Model", "Wav2Vec2Config", output="last_hidden_state", argument="input_values"),
        ((80000,),),
        8,
    ),
    "modernbert": Entry(
        "ModernBERT-base, 512 tokens",
        _transformers("ModernBertModel", "ModernBertConfig", **_HIDDEN),
        ((512,),),
        16,
        TOKENS,
    ),
    "roberta": Entry(
        "RoBERTa-base, 128 tokens",
        _transformers("RobertaModel", "RobertaConfig", **_HIDDEN, max_position_embeddings=514),
        ((128,),),
        vocabulary=TOKENS,
    ),
    "densenet": Entry("DenseNet-121", timm_model("densenet121"), (IMAGE,), 16),
    "efficientnetv2": Entry("EfficientNetV2-S", timm_model("efficientnetv2_rw_s"), (IMAGE,), 16),
    "mobilenetv4": Entry("MobileNetV4-M", timm_model("mobilenetv4_conv_medium"), (IMAGE,), 16),
}


@torch.no_grad()
def seeded(entry: Entry) -> nn.Module:
    """Return the model with its library's random initialization, and batch norms with the statistics of random inputs.

    Without these, the activations of a deep model would leave the range of float16. Matrices that the library leaves at
    zero, such as an output layer, are random too, or all results would be zeros.
    """
    torch.manual_seed(0)
    module = entry.make()
    for parameter in module.parameters():
        if parameter.dim() > 1 and not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    norms = [part for part in module.modules() if isinstance(part, nn.modules.batchnorm._BatchNorm)]
    if norms:
        for norm in norms:
            norm.momentum = 1.0
        module.train()(*entry.inputs(4, 2))
    return module.eval()
