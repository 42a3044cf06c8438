"""Models of rows of numbers: `linear` and `mlp`, which carry their own standardisation.

Inputs and outputs are in the data's own units. Buffers hold the training split's statistics, so
checkpoints, exports and teachers have them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from utils.errors import UserError, get_hint
from utils.weights.meaning import Meaning, ModelArguments

ACTIVATIONS = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU, "tanh": nn.Tanh}
NORMS = {"none": nn.Identity, "layer": nn.LayerNorm, "batch": nn.BatchNorm1d}


class ColumnUnits(nn.Module):
    """Mean and standard deviation of columns; None leaves numbers as they are."""

    mean: Tensor
    std: Tensor

    def __init__(
        self, width: int, mean: Sequence[float] | None = None, std: Sequence[float] | None = None
    ) -> None:
        super().__init__()
        for name, values, default in (("mean", mean, 0.0), ("std", std, 1.0)):
            values = [default] * width if values is None else list(values)
            self.register_buffer(name, torch.tensor(values).float())


class Standardise(ColumnUnits):
    """(x - mean) / std of each column, in float32."""

    def forward(self, values: Tensor) -> Tensor:
        """[B, width]."""
        return (values.float() - self.mean) / self.std


class Unstandardise(ColumnUnits):
    """Predictions in the units of the targets, of predictions in units of their spread."""

    def forward(self, outputs: Tensor) -> Tensor:
        """Float32 [B, width], followed by [B, width] logarithms of variances if there are any."""
        outputs, width = outputs.float(), len(self.mean)
        values = self.mean + self.std * outputs[:, :width]
        if outputs.shape[1] == width:
            return values
        return torch.cat([values, outputs[:, width:] + 2 * self.std.log()], dim=1)


class RowModel(nn.Module):
    """Base of models of rows; a subclass gives `build` and `predict`.

    Args:
      in_features: columns of an input.
      out_features: columns of a target.
      variance: whether the logarithm of each target's variance is predicted, too.
      statistics: any of `input_mean`, `input_std`, `target_mean`, `target_std`.
      shape: further arguments of `build`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        variance: bool = False,
        statistics: Mapping[str, Sequence[float]] | None = None,
        **shape: Any,
    ) -> None:
        super().__init__()
        of = statistics or {}
        self.num_outputs = out_features * (2 if variance else 1)
        self.inputs = Standardise(in_features, of.get("input_mean"), of.get("input_std"))
        self.outputs = Unstandardise(out_features, of.get("target_mean"), of.get("target_std"))
        self.build(in_features, **shape)

    def build(self, in_features: int) -> None:
        """Create the layers."""
        raise NotImplementedError

    def predict(self, values: Tensor) -> Tensor:
        """[B, num_outputs] of standardised inputs [B, in_features]."""
        raise NotImplementedError

    def forward(self, inputs: Tensor) -> Tensor:
        """Float32 predictions [B, out_features]; with variance [B, 2 * out_features]."""
        return self.outputs(self.predict(self.inputs(inputs)))


class LinearRegression(RowModel):
    """One affine map; its initial values are zero, the mean of the targets."""

    def build(self, in_features: int) -> None:
        self.head = nn.Linear(in_features, self.num_outputs)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def predict(self, values: Tensor) -> Tensor:
        return self.head(values)


@dataclass(frozen=True)
class MLPShape(ModelArguments):
    """`model.args` of an `mlp`."""

    widths: tuple[int, ...] = (64, 64)  # units of each hidden layer
    activation: str = "relu"  # one of ACTIVATIONS
    norm: str = "none"  # before each activation, one of NORMS
    dropout: float = 0.0  # after each activation

    def check(self) -> None:
        """Raise a UserError for values that no model can be built from."""
        for key, known in (("activation", ACTIVATIONS), ("norm", NORMS)):
            value = getattr(self, key)
            if value not in known:
                raise UserError(f"model.args.{key} ({value!r}): {get_hint(str(value), known)}")
        is_list = isinstance(self.widths, Sequence) and self.widths
        if not is_list or not all(isinstance(w, int) and w > 0 for w in self.widths):
            raise UserError(
                f"model.args.widths ({self.widths!r}) must be a list of numbers of units, such as "
                "[64, 64]; without hidden layers use model.name linear"
            )
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise UserError(f"model.args.dropout ({self.dropout!r}) must be at least 0 and below 1")

    def list_meanings(self) -> dict[str, Meaning]:
        return {"activation": Meaning(self.activation, ("blocks.*",))}


class MLP(RowModel):
    """Hidden layers `blocks.N` of linear map, norm, activation and dropout, and a linear head."""

    def build(self, in_features: int, **shape: Any) -> None:
        form = MLPShape(**shape)
        form.check()
        norm, widths = NORMS[form.norm], [in_features, *form.widths]
        self.blocks = nn.Sequential()
        for before, after in pairwise(widths):
            layers = nn.Linear(before, after), norm(after), ACTIVATIONS[form.activation]()
            self.blocks.append(nn.Sequential(*layers, nn.Dropout(form.dropout)))
        self.head = nn.Linear(widths[-1], self.num_outputs)

    def predict(self, values: Tensor) -> Tensor:
        return self.head(self.blocks(values))
