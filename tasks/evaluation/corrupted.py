"""The corruption errors of ImageNet-C and their mean, mCE."""

from __future__ import annotations

from collections.abc import Mapping

SEVERITIES = (1, 2, 3, 4, 5)
# Corruption -> AlexNet's error, mean over the five severities.
# Source: Hendrycks and Dietterich 2019, arXiv:1903.12261, table 1, in the digits of their code.
CORRUPTIONS = {
    "gaussian_noise": 0.886428, "shot_noise": 0.894468, "impulse_noise": 0.922640,
    "defocus_blur": 0.819880, "glass_blur": 0.826268, "motion_blur": 0.785948,
    "zoom_blur": 0.798360, "snow": 0.866816, "frost": 0.826572, "fog": 0.819324,
    "brightness": 0.564592, "contrast": 0.853204, "elastic_transform": 0.646056,
    "pixelate": 0.717840, "jpeg_compression": 0.606500,
}  # fmt: skip


def compute_corruption_errors(top1: Mapping[tuple[str, int], float]) -> dict[str, float]:
    """Percent of AlexNet's error, of each corruption whose five severities are all there.

    Args:
      top1: percent, by corruption and severity.

    Source: as above, section 4.2.
    """
    found = {}
    for name, alexnet in CORRUPTIONS.items():
        errors = [1.0 - top1[name, s] / 100.0 for s in SEVERITIES if (name, s) in top1]
        if len(errors) == len(SEVERITIES):
            found[name] = 100.0 * sum(errors) / len(errors) / alexnet
    return found


def compute_mce(errors: Mapping[str, float]) -> float | None:
    """Mean corruption error in percent; none where a corruption is missing."""
    if set(errors) != set(CORRUPTIONS):
        return None
    return sum(errors.values()) / len(errors)
