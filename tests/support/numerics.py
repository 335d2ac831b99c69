"""What "right" means in numbers (docs/architecture.md, section 6)."""

import numpy as np
from numpy.typing import ArrayLike


def assert_design6(ours: ArrayLike, ref_f32: ArrayLike, ref_16bit: ArrayLike, *, seed: object = None) -> None:
    """Hold `ours` against PyTorch in float32, and against PyTorch in our 16-bit dtype; all of one shape [..., classes].

    Pearson r > 0.999; RMS error at most 1.25 x the 16-bit reference's; the same argmax along the last axis,
    except that two candidates closer than what 16 bits cost PyTorch on this very input are a tie.
    `seed` is whatever reproduces the inputs; it is in the message.
    """
    ours, ref, half = (np.asarray(array, np.float64) for array in (ours, ref_f32, ref_16bit))
    where = f"(seed {seed})"
    assert ours.shape == ref.shape == half.shape, f"shapes {ours.shape}, {ref.shape}, {half.shape} {where}"
    assert np.isfinite(ours).all(), f"{np.count_nonzero(~np.isfinite(ours))} values are not finite {where}"
    assert ref.std() > 0, f"the reference is constant, so it proves nothing {where}"

    r = np.corrcoef(ours.ravel(), ref.ravel())[0, 1]
    assert r > 0.999, f"Pearson r is {r:.6f}, not above 0.999 {where}"

    error, allowed = _rms(ours - ref), 1.25 * _rms(half - ref)
    assert error <= allowed, f"RMS error {error:.3e} is above 1.25 x PyTorch's in 16 bits, {allowed:.3e} {where}"

    tie = 2 * np.abs(half - ref).max(axis=-1)
    chosen = np.take_along_axis(ref, ours.argmax(axis=-1)[..., None], axis=-1)[..., 0]
    behind = ref.max(axis=-1) - chosen
    assert (behind <= tie).all(), f"another argmax, {behind.max():.3e} behind the right one {where}"


def _rms(values: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(values))))
