"""The benchmark of a vision network in 8 bits: which views it judges, and what it counts."""

from __future__ import annotations

import numpy as np
from PIL import Image

from benchmarks.quality import vision as quality_vision


def test_views_are_the_whole_and_its_quarters_and_their_mirror_images() -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8))
    seen = list(quality_vision.views(picture))
    assert len(seen) == 10 and len({x.tobytes() for x in seen}) == 10
    np.testing.assert_allclose(seen[1], seen[0][..., ::-1], atol=0.05)


def test_crops_are_the_same_for_a_seed() -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8))
    found = [list(quality_vision.random_crops(picture, np.random.default_rng(seed))) for seed in (1, 1, 2)]
    assert len(found[0]) == quality_vision.CROPS
    np.testing.assert_array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])


def test_every_photograph_is_there() -> None:
    assert all(min(quality_vision.photograph(name).size) >= 200 for name in quality_vision.PHOTOGRAPHS)


def test_the_summary_counts_equal_classes_and_leaves_common_shifts_out() -> None:
    exact = np.array([[0.0, 1.0], [3.0, 1.0], [0.0, 2.0], [5.0, 4.0]])
    rounded = exact + 7
    rounded[3] = [4.0, 5.0]
    assert quality_vision.summary(exact, rounded) == "same class: 3 of 4 (75.0%); logits differ by 0.500 (RMS)"
