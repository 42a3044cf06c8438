"""Affine maps that bring a teacher's features to one scale: per channel, or PHI-S.

The scales of different teachers differ by orders of magnitude, so that the squared error of one
would dominate. The student therefore learns `forward` of their features; `inverse` returns to the
teacher's own space.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

# A channel below this share of the mean variance counts as dead: it stays near 0 instead of
# becoming noise of unit size.
DEAD = 1e-10


class AffineMap(nn.Module):
    """y = (x - mean) @ matrix, and back by `inverse`; float32 buffers, no parameter.

    `mean` is [D]; `matrix` and `inverse` are [D, D], or [D], a factor for each channel.
    """

    mean: Tensor
    matrix: Tensor
    back: Tensor

    def __init__(self, mean: Tensor, matrix: Tensor, inverse: Tensor) -> None:
        super().__init__()
        for name, value in (("mean", mean), ("matrix", matrix), ("back", inverse)):
            self.register_buffer(name, value.float(), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        """Map the teacher's [..., D] to unit scale."""
        return _multiply(features.float() - self.mean, self.matrix)

    def inverse(self, features: Tensor) -> Tensor:
        """Map [..., D] at unit scale to the teacher's own space."""
        return _multiply(features.float(), self.back) + self.mean


def _multiply(values: Tensor, matrix: Tensor) -> Tensor:
    return values @ matrix if matrix.ndim == 2 else values * matrix


def create_channel_map(mean: Tensor, variances: Tensor) -> AffineMap:
    """Create a map of each channel to mean 0 and variance 1; dead channels are only centred.

    Mean and variances are float64 [D], at least one variance above 0.
    """
    typical = variances.mean()
    spread = torch.where(variances > DEAD * typical, variances, typical).sqrt()
    return AffineMap(mean, 1 / spread, spread)


def create_phi_s_map(mean: Tensor, eigenvalues: Tensor, eigenvectors: Tensor) -> AffineMap:
    """Create a rotation to equal variances of all channels, with one factor that makes them 1.

    Distances keep their proportions, unlike with a factor for each channel: an error of the student
    weighs alike in every direction of the teacher's space.

    Args:
      mean: float64 [D].
      eigenvalues: float64 [D] of the covariance, at least one above 0.
      eigenvectors: float64 [D, D], in columns.

    Source: Ranzinger et al. 2024 (PHI-S), arXiv:2410.01680, section 3: (x - mean) U H^T / alpha,
    alpha^2 the mean eigenvalue. For widths without a known Hadamard matrix, `even_out` has the same
    property.
    """
    width = len(mean)
    hadamard = create_hadamard(width)
    if hadamard is None:
        rotation = even_out(eigenvalues)
    else:
        rotation = hadamard / math.sqrt(width)
    alpha = eigenvalues.clamp(min=0).mean().sqrt()
    turned = eigenvectors @ rotation.T
    return AffineMap(mean, turned / alpha, alpha * turned.T)


def create_hadamard(order: int) -> Tensor | None:
    """Return float64 [order, order] of 1 and -1 with orthogonal rows; None if it is not known.

    Sylvester's doubling and both of Paley's constructions over prime fields, and their Kronecker
    products: all widths of the common vision transformers (192, 384, 768, 1024, 1152, 1280, 1408,
    1536, 1664) are among them.

    Source: Paley 1933, Journal of Mathematics and Physics 12, lemmas 2 and 3.
    """
    if order in (1, 2):
        return torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)[:order, :order]
    if order < 1 or order % 4:
        return None
    if order & (order - 1) == 0:
        two, half = create_hadamard(2), create_hadamard(order // 2)
        assert two is not None and half is not None  # all powers of two are known
        return torch.kron(two, half)
    if _is_prime(order - 1):
        return torch.eye(order, dtype=torch.float64) + _create_conference(order - 1, -1.0)
    if (order // 2) % 4 == 2 and _is_prime(order // 2 - 1):
        return _create_second_paley(order // 2 - 1)
    for factor in [2, *range(4, math.isqrt(order) + 1, 4)]:
        if order % factor:
            continue
        small, large = create_hadamard(factor), create_hadamard(order // factor)
        if small is not None and large is not None:
            return torch.kron(small, large)
    return None


def _is_prime(number: int) -> bool:
    return number > 1 and all(number % n for n in range(2, math.isqrt(number) + 1))


def _create_conference(prime: int, corner: float) -> Tensor:
    """Return [q + 1, q + 1]: the Jacobsthal matrix bordered by ones, the column times `corner`.

    Jacobsthal's entry (i, j) is the quadratic character of i - j.
    """
    squares = {n * n % prime for n in range(1, prime)}
    character = [0.0] + [1.0 if n in squares else -1.0 for n in range(1, prime)]
    positions = torch.arange(prime)
    matrix = torch.zeros(prime + 1, prime + 1, dtype=torch.float64)
    table = torch.tensor(character, dtype=torch.float64)
    matrix[1:, 1:] = table[(positions[:, None] - positions[None, :]) % prime]
    matrix[0, 1:] = 1
    matrix[1:, 0] = corner
    return matrix


def _create_second_paley(prime: int) -> Tensor:
    """Return order 2 (q + 1), q = 1 mod 4."""
    zeros = torch.tensor([[1.0, -1.0], [-1.0, -1.0]], dtype=torch.float64)
    others = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    eye = torch.eye(prime + 1, dtype=torch.float64)
    return torch.kron(eye, zeros) + torch.kron(_create_conference(prime, 1.0), others)


def even_out(eigenvalues: Tensor) -> Tensor:
    """Return float64 [D, D] rotation Q that makes diag(Q diag(eigenvalues) Q^T) constant.

    Each of at most D - 1 plane rotations brings one diagonal entry to the mean, as Bendel and
    Mickey 1978 (Communications in Statistics B7) create correlation matrices of given eigenvalues.
    """
    matrix = torch.diag(eigenvalues.double())
    rotation = torch.eye(len(eigenvalues), dtype=torch.float64)
    mean = eigenvalues.double().mean()
    open_rows = torch.ones(len(eigenvalues), dtype=torch.bool)
    for _ in range(len(eigenvalues) - 1):
        gaps = torch.where(open_rows, matrix.diagonal() - mean, torch.zeros_like(mean))
        low, high = int(gaps.argmin()), int(gaps.argmax())
        if gaps[low] >= 0 or gaps[high] <= 0:
            break
        below, above, between = gaps[low], gaps[high], matrix[low, high]
        tangent = (-between + (between.square() - below * above).sqrt()) / above
        cosine = 1 / (1 + tangent.square()).sqrt()
        turn = torch.stack([cosine, tangent * cosine, -tangent * cosine, cosine]).reshape(2, 2)
        pair = [low, high]
        matrix[pair] = turn @ matrix[pair]
        matrix[:, pair] = matrix[:, pair] @ turn.T
        rotation[pair] = turn @ rotation[pair]
        open_rows[low] = False
    return rotation
