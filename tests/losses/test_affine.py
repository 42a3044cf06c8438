"""PHI-S and standardisation by channel, against NumPy's own covariances."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from losses.features.affine import create_channel_map, create_hadamard, create_phi_s_map, even_out

# Hadamard matrices by doubling, by both of Paley's constructions and by products; and widths that
# no matrix is made for, multiples of 4 (52) or not.
WIDTHS = (2, 8, 12, 28, 24, 48, 192, 7, 30, 52)
RELEASED = (192, 384, 768, 1024, 1152, 1280, 1408, 1536, 1664)


def draw_features(width: int) -> np.ndarray:
    """[N, width] of correlated channels, whose scales span three orders of magnitude."""
    numbers = np.random.default_rng(width)
    mixing = numbers.normal(size=(width, width)) * 10.0 ** numbers.uniform(-2, 1, width)
    return numbers.normal(size=(4 * width, width)) @ mixing + numbers.normal(size=width)


def create_map(features: np.ndarray):
    mean, covariance = features.mean(axis=0), np.cov(features.T, bias=True)
    values, vectors = np.linalg.eigh(covariance)
    return create_phi_s_map(*(torch.from_numpy(one) for one in (mean, values, vectors))).double()


@pytest.mark.parametrize("width", WIDTHS)
def test_phi_s_gives_every_channel_mean_0_and_variance_1_and_keeps_proportions(width):
    features = draw_features(width)
    scaled = create_map(features)(torch.from_numpy(features).float()).numpy().astype(np.float64)
    covariance = np.cov(scaled.T, bias=True)
    np.testing.assert_allclose(np.diag(covariance), 1, atol=2e-4)
    np.testing.assert_allclose(scaled.mean(axis=0), 0, atol=1e-3)
    # Rotated and divided by one number: the spectrum is the features' own.
    own = np.linalg.eigvalsh(np.cov(features.T, bias=True))
    np.testing.assert_allclose(np.linalg.eigvalsh(covariance), own / own.mean(), atol=1e-3)
    ratios = np.linalg.norm(scaled[1:] - scaled[0], axis=1) / np.linalg.norm(
        features[1:] - features[0], axis=1
    )
    np.testing.assert_allclose(ratios, 1 / np.sqrt(own.mean()), rtol=1e-4)


@pytest.mark.parametrize("width", [12, 30])
def test_the_inverse_restores_the_teachers_space(width):
    features = torch.from_numpy(draw_features(width)).float()
    for scaling in (
        create_map(features.double().numpy()).float(),
        create_channel_map(features.double().mean(0), features.double().var(0)),
    ):
        torch.testing.assert_close(
            scaling.inverse(scaling(features)), features, rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("width", RELEASED)
def test_the_widths_of_released_teachers_have_a_hadamard_matrix(width):
    matrix = create_hadamard(width)
    assert set(matrix.unique().tolist()) == {1.0, -1.0}
    assert torch.equal(matrix @ matrix.T, width * torch.eye(width, dtype=torch.float64))


def test_a_power_of_two_width_uses_sylvesters_matrix():
    one = np.array([[1.0, 1.0], [1.0, -1.0]])
    assert np.array_equal(create_hadamard(4).numpy(), np.kron(one, one))
    assert all(create_hadamard(width) is None for width in (0, 3, 6, 30, 52, 92))


@pytest.mark.parametrize("values", [[1.0, 1.0, 1.0], [0.0, 0.0, 9.0], [5.0], [1e-9, 1e9, 3.0, 3.0]])
def test_a_rotation_equalises_any_spectrum(values):
    spectrum = torch.tensor(values, dtype=torch.float64)
    rotation = even_out(spectrum)
    eye = torch.eye(len(values), dtype=torch.float64)
    torch.testing.assert_close(rotation @ rotation.T, eye)
    turned = rotation @ torch.diag(spectrum) @ rotation.T
    torch.testing.assert_close(turned.diagonal(), spectrum.mean().expand(len(values)))


def test_a_constant_channel_is_not_amplified():
    mean = torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)
    variances = torch.tensor([4.0, 0.0, 8.0], dtype=torch.float64)
    scaled = create_channel_map(mean, variances)(torch.tensor([[3.0, 2.5, 3.0]]))
    torch.testing.assert_close(scaled, torch.tensor([[1.0, 0.25, 0.0]]))


@pytest.mark.xla
def test_the_maps_on_xla_equal_numpys():
    torch_xla = pytest.importorskip("torch_xla")
    features = draw_features(24)
    values, vectors = np.linalg.eigh(np.cov(features.T, bias=True))
    hadamard = create_hadamard(24).numpy() / np.sqrt(24)
    wanted = (features - features.mean(0)) @ vectors @ hadamard.T / np.sqrt(values.mean())
    scaling = create_map(features).float().to(torch_xla.device())
    found = scaling(torch.from_numpy(features).float().to(torch_xla.device()))
    np.testing.assert_allclose(found.cpu().numpy(), wanted, atol=1e-4)
