"""Computes pseudo-random numbers from (seed, step, example), for losses and erasing."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from losses.base import LossInputs
from utils.errors import UserError

BITS = 0xFFFFFFFF  # of a state, in int64, so that no product of the factors below overflows
EXAMPLE, POSITION = 0x1E3779B1, 0x05EBCA77
ROUNDS = ((16, 0x7FEB352D), (15, 0x5BD1E995))


def draw_words(indices: Tensor, key: Tensor, count: int) -> Tensor:
    """Return [B, count] int64 in [0, 2^32) from each example's index and the step's key.

    A hash on the device from shifts, exclusive ors and products of integers, which are equal on
    every device and for every number of ranks.

    Args:
      indices: int [B], positions in the training split.
      key: int64 [1], below 2^31.
    """
    positions = torch.arange(count, device=indices.device, dtype=torch.int64)
    state = (indices.long().unsqueeze(1) & BITS) * EXAMPLE + positions * POSITION + key
    for shift, factor in ROUNDS:
        state = state & BITS
        state = ((state ^ (state >> shift)) & BITS) * factor
    state = state & BITS
    return state ^ (state >> 16)


def draw_uniform(indices: Tensor, key: Tensor, count: int) -> Tensor:
    """Return [B, count] float32 in [0, 1), from `draw_words`."""
    return (draw_words(indices, key, count) >> 8).to(torch.float32) / 2**24


def draw_normal(indices: Tensor, key: Tensor, count: int) -> Tensor:
    """Return [B, count] float32, mean 0, variance 1, in -5.3 to 5.3, from `draw_words`."""
    # Never 0 or 1, and exact in float32.
    shares = ((draw_words(indices, key, count) >> 9).to(torch.float32) + 0.5) / 2**23
    return torch.erfinv(2 * shares - 1) * math.sqrt(2)


def draw_for(inputs: LossInputs, count: int, name: str) -> Tensor:
    """Return [B, count] uniform numbers for a step's examples; a UserError without indices."""
    if inputs.example_indices is None:
        raise UserError(
            f"distill.losses: {name} draws its masks by the examples' indices and the step has "
            "none; use it in a run, whose loader gives them"
        )
    return draw_uniform(inputs.example_indices, get_noise_key(inputs), count)


def get_noise_key(inputs: LossInputs) -> Tensor:
    """Return the step's int64 [1]; 0 if it has none."""
    if inputs.noise_key is not None:
        return inputs.noise_key
    return torch.zeros(1, dtype=torch.int64, device=inputs.student_logits.device)
