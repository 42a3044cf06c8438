"""Two students that teach each other: the student and a peer, or two passes of one student.

The two passes differ in their draws of stochastic depth. The peer is a module of the losses: the
same optimizer trains it, checkpoints contain it, exports do not. Both see the same mixed images in
a step, learn from the targets and each other's outputs, and get no gradient through the other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from losses.base import LossInputs, LossOutput
from losses.weighted import WeightedLoss
from models.factory import create_model
from models.transforms import InputTransform
from tasks.images.dry_run import explain_rejection
from utils.config.sections import ModelSection
from utils.errors import UserError

if TYPE_CHECKING:
    from tasks.images.dry_run import ImageShapes
    from utils.config.load import RunConfig

SELF = "self"


def create_peer(config: RunConfig, num_classes: int, device: str = "cpu") -> nn.Module | None:
    """Create the peer with its own weights; None without one, or if it is the student itself."""
    if config.distill.peer in ("", SELF):
        return None
    section = ModelSection(name=config.distill.peer, args=config.distill.peer_args)
    with torch.random.fork_rng(devices=[]):
        # Other weights than the student's, which may be of the same model.
        torch.manual_seed(config.train.seed + 1)
        return create_model(section, num_classes=num_classes, device=device)


def learn_together(losses: WeightedLoss, inputs: LossInputs, peer_logits: Tensor) -> LossOutput:
    """Return the sum of both students' losses, or their mean if both are one model.

    `inputs` are the student's, without a teacher; the gradient of `peer_logits` [B, K] reaches the
    peer. The returned terms are the student's, and the peer's total loss as `peer`.

    Source: Zhang et al. 2018 (DML), arXiv:1706.00384, equations 4 to 7; Touvron et al. 2022
    (cosub), arXiv:2212.04884, equation 2, for one model.
    """
    mine = losses(replace(inputs, teacher_logits=(peer_logits.detach(),)))
    logits = inputs.student_logits.detach()
    theirs = losses(replace(inputs, student_logits=peer_logits, teacher_logits=(logits,)))
    total = mine.total + theirs.total
    if losses.peer is None:
        total = total / 2
    return LossOutput(total, {**mine.terms, "peer": theirs.total.detach()})


def check_peer(
    config: RunConfig,
    losses: WeightedLoss,
    peer: nn.Module | None,
    transform: InputTransform,
    shapes: ImageShapes,
) -> None:
    """Refuse losses that two students cannot share, and a peer that does not take the images.

    The peer is on the meta device. `shapes` are (H, W, C) by role, None if only a run can tell.
    """
    for name, loss in zip(losses.names, losses.losses, strict=True):
        if loss.state_dict() or loss.needs_distill_token():
            raise UserError(
                f"distill.peer is not supported with {name}, which has parameters, a memory or a "
                "head for one student only; use losses of logits alone, such as kd"
            )
    if peer is None:
        return
    for shape in _list_seen(config, shapes):
        reason = explain_rejection(peer.eval(), transform.to("meta"), shape)
        if reason:
            sides = " x ".join(map(str, shape))
            raise UserError(
                f"distill.peer {config.distill.peer!r} does not take images of {sides}, as the "
                f"student sees them: {reason}; set img_size, in_chans or dynamic_img_size in "
                "distill.peer_args, or use another model"
            )


def _list_seen(config: RunConfig, shapes: ImageShapes) -> list[tuple[int, int, int]]:
    """Return the shapes of the images that both students see, in training and evaluation."""
    if config.run.eval_only:  # the peer is not used
        return []
    train, sizes = shapes["train"], config.train.image_sizes
    # Before the first epoch in `sizes`, images keep their size.
    seen = [] if 0 in sizes else [train]
    seen += [(side, side, train[2]) for side in sizes.values()] if train is not None else []
    return [shape for shape in dict.fromkeys([*seen, shapes["eval"]]) if shape is not None]
