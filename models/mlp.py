"""Models of rows of numbers: `linear` and `mlp`, which carry their own standardisation.

Both take and give numbers in the data's own units. What is between is standardised by buffers that
hold the training split's statistics, so whoever has the weights has them: a checkpoint, an export,
a teacher.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn

from utils.errors import UserError, get_hint
from utils.weights.meaning import Meaning, ModelArguments

ACTIVATIONS: dict[str, type[nn.Module]] = {
    "relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh,
}  # fmt: skip
NORMS: dict[str, type[nn.Module]] = {
    "none": nn.Identity, "layer": nn.LayerNorm, "batch": nn.BatchNorm1d,
}  # fmt: skip


class ColumnUnits(nn.Module):
    """What columns are measured in.

    Args:
      mean, std: of the columns; none: numbers stay as they are.
    """

    def __init__(
        self, width: int, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        self.register_buffer("mean", _as_buffer(mean, 0.0, width))
        self.register_buffer("std", _as_buffer(std, 1.0, width))


class Standardise(ColumnUnits):
    """(x - mean) / std of each column, in float32."""

    def forward(self, values: Tensor) -> Tensor:
        """[B, width]."""
        return (values.float() - self.mean) / self.std


class Unstandardise(ColumnUnits):
    """Answers in the units of the targets, out of answers in units of their spread."""

    def forward(self, answers: Tensor) -> Tensor:
        """Float32 [B, width], followed by [B, width] logarithms of variances where there are."""
        answers, width = answers.float(), len(self.mean)
        values = self.mean + self.std * answers[:, :width]
        if answers.shape[1] == width:
            return values
        return torch.cat([values, answers[:, width:] + 2 * self.std.log()], dim=1)


class RowModel(nn.Module):
    """What models of rows share: standardised in, the data's units out.

    Args:
      in_features: columns of an input.
      out_features: columns of a target.
      variance: whether the logarithm of each target's variance is answered, too.
      statistics: `input_mean`, `input_std`, `target_mean`, `target_std`, as far as wanted.
    """

    def __init__(
        self, in_features: int, out_features: int, *, variance: bool = False,
        statistics: Mapping[str, Sequence[float]] | None = None,
    ) -> None:  # fmt: skip
        super().__init__()
        given = statistics or {}
        self.num_answers = out_features * (2 if variance else 1)
        self.inputs = Standardise(in_features, given.get("input_mean"), given.get("input_std"))
        spread = given.get("target_mean"), given.get("target_std")
        self.outputs = Unstandardise(out_features, *spread)

    def answer(self, values: Tensor) -> Tensor:
        """[B, num_answers] of standardised inputs [B, in_features]."""
        raise NotImplementedError

    def forward(self, inputs: Tensor) -> Tensor:
        """Float32 predictions [B, out_features]; with variance [B, 2 * out_features]."""
        return self.outputs(self.answer(self.inputs(inputs)))


class LinearRegression(RowModel):
    """One affine map; its initial values are zero, the mean of the targets."""

    def __init__(
        self, in_features: int, out_features: int, *, variance: bool = False,
        statistics: Mapping[str, Sequence[float]] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, variance=variance, statistics=statistics)
        self.head = nn.Linear(in_features, self.num_answers)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def answer(self, values: Tensor) -> Tensor:
        """The affine map."""
        return self.head(values)


@dataclass(frozen=True)
class MLPShape(ModelArguments):
    """What `model.args` may say of an `mlp`.

    Args:
      widths: units of each hidden layer.
      activation: one of ACTIVATIONS.
      norm: before each activation, one of NORMS; `batch` is a batch's own in training.
      dropout: after each activation.
    """

    widths: tuple[int, ...] = (64, 64)
    activation: str = "relu"
    norm: str = "none"
    dropout: float = 0.0

    def check(self) -> None:
        """Refuse what cannot be built."""
        for key, known in (("activation", ACTIVATIONS), ("norm", NORMS)):
            value = getattr(self, key)
            if value not in known:
                raise UserError(f"model.args.{key} ({value!r}): {get_hint(str(value), known)}")
        is_list = isinstance(self.widths, list | tuple) and len(self.widths) > 0
        if not is_list or not all(isinstance(w, int) and w > 0 for w in self.widths):
            raise UserError(
                f"model.args.widths ({self.widths!r}) must be a list of numbers of units, such as "
                "[64, 64]; for none, take the model linear"
            )
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise UserError(f"model.args.dropout ({self.dropout!r}) must be at least 0 and below 1")

    def list_meanings(self) -> dict[str, Meaning]:
        """The activation has no tensor; norms have, and dropout is of training alone."""
        return {"activation": Meaning(self.activation, ("blocks.*",))}


class MLP(RowModel):
    """Hidden layers of linear map, norm, activation and dropout, and a linear head.

    Feature losses find the hidden layers as `blocks.0`, `blocks.1` and so on.
    """

    def __init__(
        self, in_features: int, out_features: int, *, variance: bool = False,
        statistics: Mapping[str, Sequence[float]] | None = None, **shape: object,
    ) -> None:  # fmt: skip
        super().__init__(in_features, out_features, variance=variance, statistics=statistics)
        form = MLPShape(**shape)
        form.check()
        widths = [in_features, *form.widths]
        blocks = [_create_block(before, after, form) for before, after in pairwise(widths)]
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(widths[-1], self.num_answers)

    def answer(self, values: Tensor) -> Tensor:
        """The head's answer to the last hidden layer."""
        return self.head(self.blocks(values))


def _create_block(in_features: int, out_features: int, form: MLPShape) -> nn.Sequential:
    norm = NORMS[form.norm]
    return nn.Sequential(
        nn.Linear(in_features, out_features),
        norm() if norm is nn.Identity else norm(out_features),
        ACTIVATIONS[form.activation](),
        nn.Dropout(form.dropout),
    )


def _as_buffer(values: Sequence[float] | None, default: float, width: int) -> Tensor:
    return torch.tensor([default] * width if values is None else list(values)).float()
