"""Export of language models for transformers and fla: config.json and model.safetensors."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from models.delta.layers.qwen_next import ExpertQwen
from tools.generate import load_model
from utils.errors import UserError
from utils.json_types import JsonObject, make_finite
from utils.programs import prepare_folder
from utils.storage.json_files import write_json
from utils.weights.language import FILE, describe_language, split

if TYPE_CHECKING:
    from torch import Tensor, nn

    from utils.json_types import JsonMapping

FORM, REPORT = "transformers", "export.json"
_TOKENS, _SEED = 32, 0
# Flags of image forms, with their defaults.
_OF_IMAGES = {"normalize": False, "batch_size": None, "images": "", "model": "", "model_args": ""}
_OF_IMAGES |= {"pp": "", "classes": None, "names": ""}


@dataclass(frozen=True)
class FolderDistance:
    """Differences of logits from the model's."""

    # the largest, of this program's model of the folder and of transformers'
    differences: dict[str, float]
    dropped: float = 0.0  # largest change of a logit by experts that are full here


def export_language(options: argparse.Namespace) -> int:
    """Write a language model's folder, read it back and compare logits; return the exit code.

    The folder is read by this program, and by transformers if it is installed and has the model.

    Raises:
      UserError: the weights are of another model, or a flag is of images.
    """
    for name, usual in _OF_IMAGES.items():
        if getattr(options, name, usual) != usual:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} is not supported with --to {FORM}: it is of images; remove it")
    model, facts = load_model(options.weights)
    folder = options.out / FORM
    prepare_folder(folder, "--out")
    write_folder(model, facts, folder)
    result, bound = compare_folder(model, folder), options.bound
    within = all(difference <= bound for difference in result.differences.values())
    report = {"weights": options.weights, "model": facts["model"], "bound": bound}
    write_json(folder / REPORT, make_finite({**report, **asdict(result), "within": within}))
    text = ", ".join(f"{name} {value:.1e}" for name, value in result.differences.items())
    reasons = _explain(result, bound)
    print(f"{folder}: largest difference of a logit: {text}, bound {bound:g}{reasons}")
    return 0 if within else 1


def compare_folder(model: Any, folder: Path) -> FolderDistance:
    """Compare logits of a model and of a folder, for random tokens.

    transformers drops no tokens, so experts of `models.delta.layers.qwen_next` get room for all
    tokens in that comparison, and from then on.

    Raises:
      UserError: the model's logits are not finite.
    """
    shape = (2, min(_TOKENS, model.sequence_length))
    generator = torch.Generator().manual_seed(_SEED)
    tokens = torch.randint(model.vocab_size, shape, generator=generator)
    again, _ = load_model(f"local-dir:{folder}")
    wanted = _compute(model, tokens)
    if not wanted.isfinite().all():
        raise UserError(
            "WEIGHTS gives logits that are not finite, so nothing can be compared; give other "
            f"weights, and do not use {folder}"
        )
    differences = {"own": _compare(_compute(again, tokens), wanted)}
    if (reference := _load_reference(folder)) is None:
        return FolderDistance(differences)
    whole = wanted
    if isinstance(model, ExpertQwen):
        model.make_room()
        whole = _compute(model, tokens)
    with torch.no_grad():
        differences[FORM] = _compare(reference(tokens).logits.float(), whole)
    return FolderDistance(differences, _compare(whole, wanted))


def _compute(model: Any, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model.compute_logits(model(tokens))


def _compare(logits: Tensor, wanted: Tensor) -> float:
    return float((logits - wanted).abs().max())


def _explain(result: FolderDistance, bound: float) -> str:
    """Explain why logits differ, and what to do; empty if they do not."""
    reasons, left = "", "inspect the folder, but do not use it"
    if result.dropped > bound:
        reasons = (
            f"; compared with room for all tokens: experts that are full here change a logit by up "
            f"to {result.dropped:.1e}, and none is in {FORM} (model.args.capacity_factor)"
        )
    if not result.differences["own"] <= bound:  # or it is NaN
        return f"{reasons}; the folder does not give the model back, a fault of this tool: {left}"
    if all(difference <= bound for difference in result.differences.values()):
        return reasons
    import transformers

    return (
        f"{reasons}; read back here it is the same model, and {FORM} {transformers.__version__} "
        f"computes another: install the version of requirements-delta.txt, or raise --bound where "
        f"roundings are all that differs; {left}"
    )


def write_folder(model: Any, facts: JsonMapping, folder: Path) -> None:
    """Write config.json and the weights of a model; `facts` have its name and sizes.

    Raises:
      UserError: neither transformers nor fla has such a model.
    """
    from safetensors.torch import save_file

    config: JsonObject = describe_language(facts, model.shape)
    tensors = {
        name: part.contiguous()
        for own, tensor in model.state_dict().items()
        for name, part in split(own, tensor, str(facts["model"]))
    }
    if facts["model"] == "kimi_linear":
        # transformers ties no Kimi Linear, whatever its config.json says.
        tensors.setdefault("lm_head.weight", model.head_weight.detach().clone())
    save_file(tensors, folder / FILE, {"format": "pt"})
    write_json(folder / "config.json", config)


def _load_reference(folder: Path) -> nn.Module | None:
    """Load a folder by transformers; None if it is not installed, or has no such model."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        return None
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    except ValueError:  # an unknown model_type, or class
        return None
