"""Language models as transformers and fla read them: config.json and model.safetensors."""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

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
# What image forms are asked with, and language models know nothing of.
_OF_IMAGES = {
    "normalize": False, "batch_size": None, "images": "", "model": "", "model_args": "", "pp": "",
    "classes": None, "names": "",
}  # fmt: skip


@dataclass(frozen=True)
class FolderDistance:
    """How far logits lie from the model's.

    Attributes:
      differences: the largest, of this program's model of the folder and of transformers'.
      dropped: what experts that are full here change of a logit, at most.
    """

    differences: dict[str, float]
    dropped: float = 0.0


def export_language(options: argparse.Namespace) -> int:
    """Write a language model's folder, read it back and compare logits; gives the exit code.

    They are compared with those of this program's own model of what was written, and with
    transformers' where it is installed and has the model.

    Raises:
      UserError: weights of no such model, or a flag that means nothing to it.
    """
    for name, usual in _OF_IMAGES.items():
        if getattr(options, name, usual) != usual:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} means nothing to --to {FORM}, which images do not enter; "
                            "leave it out")  # fmt: skip
    model, facts = load_model(options.weights)
    folder = options.out / FORM
    prepare_folder(folder, "--out")
    write_folder(model, facts, folder)
    found = compare_folder(model, folder)
    within = all(one <= options.bound for one in found.differences.values())
    report = {"weights": options.weights, "model": facts["model"], "bound": options.bound,
              **asdict(found), "within": within}  # fmt: skip
    write_json(folder / REPORT, make_finite(report))
    told = ", ".join(f"{name} {one:.1e}" for name, one in found.differences.items())
    reasons = _explain(found, options.bound)
    print(f"{folder}: largest difference of a logit: {told}, bound {options.bound:g}{reasons}")
    return 0 if within else 1


def compare_folder(model: nn.Module, folder: Path) -> FolderDistance:
    """Logits of a model and of what a folder gives back, for tokens that are drawn.

    transformers drops no tokens, so that experts, which `models.delta.layers.qwen_next` fills, have
    room for all of them in that comparison, and from then on.

    Raises:
      UserError: the model's logits are not finite.
    """
    tokens = torch.randint(
        model.vocab_size, (2, min(_TOKENS, model.sequence_length)),
        generator=torch.Generator().manual_seed(_SEED),
    )  # fmt: skip
    again, _ = load_model(f"local-dir:{folder}")
    wanted = _answer(model, tokens)
    if not wanted.isfinite().all():
        raise UserError(
            "WEIGHTS gives logits that are not finite, with which nothing can be compared; give "
            f"other weights, and do not use {folder}"
        )
    differences = {"own": _compare(_answer(again, tokens), wanted)}
    if (twin := _load_twin(folder)) is None:
        return FolderDistance(differences)
    whole = wanted
    if isinstance(model, ExpertQwen):
        model.make_room()
        whole = _answer(model, tokens)
    with torch.no_grad():
        differences[FORM] = _compare(twin(tokens).logits.float(), whole)
    return FolderDistance(differences, _compare(whole, wanted))


def _answer(model: nn.Module, tokens: Tensor) -> Tensor:
    with torch.no_grad():
        return model.compute_logits(model(tokens))


def _compare(found: Tensor, wanted: Tensor) -> float:
    return float((found - wanted).abs().max())


def _explain(found: FolderDistance, bound: float) -> str:
    """Why answers differ, as far as that can be told, and what to do; empty: they do not."""
    reasons, left = "", "the folder is left to be looked at, not to be used"
    if found.dropped > bound:
        reasons = (
            f"; compared with room for all tokens: experts that are full here change a logit by up "
            f"to {found.dropped:.1e}, and none is in {FORM} (model.args.capacity_factor)"
        )
    if not found.differences["own"] <= bound:  # or it is no number
        return f"{reasons}; the folder does not give the model back, a fault of this tool: {left}"
    if all(one <= bound for one in found.differences.values()):
        return reasons
    import transformers

    return (
        f"{reasons}; read back here it is the same model, and {FORM} {transformers.__version__} "
        f"computes another: install the version of requirements-delta.txt, or raise --bound where "
        f"roundings are all that differs; {left}"
    )


def write_folder(model: nn.Module, facts: JsonMapping, folder: Path) -> None:
    """Write config.json and the weights of a model of which `facts` tell name and sizes.

    Raises:
      UserError: neither transformers nor fla has such a model.
    """
    from safetensors.torch import save_file

    told: JsonObject = describe_language(facts, model.shape)
    tensors = {
        name: one.contiguous()
        for own, tensor in model.state_dict().items()
        for name, one in split(own, tensor, str(facts["model"]))
    }
    if facts["model"] == "kimi_linear":
        # transformers ties no Kimi Linear, whatever its config.json says.
        tensors.setdefault("lm_head.weight", model.head_weight.detach().clone())
    save_file(tensors, folder / FILE, {"format": "pt"})
    write_json(folder / "config.json", told)


def _load_twin(folder: Path) -> nn.Module | None:
    """transformers' model of a folder; none: it is not installed, or has no such model."""
    try:
        from transformers import AutoModelForCausalLM
    except ImportError:
        return None
    try:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    except ValueError:  # it knows no such model_type, or class
        return None
