"""Activations by module path, for feature losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from utils.errors import UserError, get_hint


class FeatureTap:
    """Outputs of named submodules of a model from its last forward.

    Args:
      paths: of modules such as `blocks.3`, or of parameters such as `fc.weight`.
      side: `student` or `teacher`, for messages.

    Raises:
      UserError: no such module or parameter; names the near ones.
    """

    def __init__(self, model: nn.Module, paths: Sequence[str], side: str) -> None:
        self._kept: dict[str, Tensor] = {}
        self._model = model
        modules = dict(model.named_modules())
        parameters = dict(model.named_parameters())
        self._parameters = [path for path in paths if path in parameters]
        for path in paths:
            if path in parameters:
                continue
            if path not in modules or not path:
                known = [name for name in (*modules, *parameters) if name]
                hint = get_hint(path, known)
                if not hint.startswith("did you mean"):
                    hint = f"its layers are {', '.join(known[:8])}, ..."
                raise UserError(f"distill.losses: the {side} has no layer {path!r}; {hint}")
            modules[path].register_forward_hook(self._create_hook(path))

    def take(self) -> dict[str, Tensor]:
        """Return the outputs by path since the last call, once, and parameters."""
        kept = self._kept
        self._kept = {}
        # Looked up anew: a move to another device may have replaced them.
        return kept | {path: self._model.get_parameter(path) for path in self._parameters}

    def _create_hook(self, path: str) -> Callable[..., None]:
        def keep(_: nn.Module, _inputs: tuple[Tensor, ...], output: Tensor | list[Tensor]) -> None:
            self._kept[path] = output if isinstance(output, Tensor) else output[0]

        return keep


@torch.no_grad()
def get_feature_shapes(
    model: nn.Module,
    paths: Sequence[str],
    input_shape: tuple[int, ...],
    side: str,
    dtype: torch.dtype = torch.float32,
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of activations for a batch of two, by a forward on the meta device.

    Args:
      model: on the meta device.
      input_shape: (C, H, W) of an image, (D,) of a row, (T,) of tokens.
      dtype: of the input; of tokens an integer.
    """
    if not paths:
        return {}
    tap = FeatureTap(model, paths, side)
    model.eval()
    model(torch.empty((2, *input_shape), dtype=dtype, device="meta"))
    return {path: tuple(value.shape) for path, value in tap.take().items()}
