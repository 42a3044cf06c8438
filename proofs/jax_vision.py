"""Holds a step of a vision transformer, Mixer or ResNet against the same in plain JAX, by the TPU compiler.

    python -m proofs.jax_vision --config configs/tpu_step.yaml --batch 128 --num-classes 1000

Both are compiled by the same libtpu for one device: ours as the engine traces it, in the
micro-batches that cost least (`--split` leaves the search out), JAX's as `bill/children/vision_child.py`
or `resnet_child.py` writes it, as one batch: AdamW, labels or one teacher's softened answers (not for
a ResNet), neither clipping nor mixing. Exit code 1: ours costs more by the estimate or by bundles.
"""  # noqa: E501

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bill import step_report
from bill.compiler import require_compiler
from bill.targets import COMPILERS, OWN, parse_target
from bill.yardstick import compile_jax
from models.factory import build_model, create_model
from models.teachers.teacher import get_teacher_sections
from utils.config.load import load_config
from utils.errors import UserError
from utils.programs import create_program_parser, prepare_file, require_at_least, run_program
from utils.storage.json_files import write_json

if TYPE_CHECKING:
    from bill.schema import Report
    from bill.step_report import Compilation
    from utils.config.distill import TeacherSection
    from utils.config.load import RunConfig
    from utils.json_types import JsonObject

_CHILDREN = Path(__file__).resolve().parents[1] / "bill" / "children"
_KINDS = {
    "VisionTransformer": "vit",
    "VisionTransformerDistilled": "vit",
    "MlpMixer": "mixer",
    "ResNet": "resnet",
}
# timm's other ResNets have another stem, other blocks or another shortcut.
_RESNETS = ("resnet50", "resnet101", "resnet152")
_FIGURES = ("estimated_mcycles", "bundles_mcycles", "peak_gib", "tflop")


def main(argv: Sequence[str] | None = None) -> int:
    """Parse flags, compile both, print; gives the exit code."""
    return run_program(run, *parse_arguments(argv))


def parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Parse the tool's own flags, and those of main.py that change the run."""
    parser = create_program_parser(__doc__, prog="python -m proofs.jax_vision", allow_abbrev=False)
    add = parser.add_argument
    add("--config", type=Path, required=True, help="the run's YAML")
    add("--target", default="v5e:1x1", help="generation and slice (default %(default)s)")
    add("--compiler", choices=COMPILERS, default=OWN, help="as tools.compile_for_tpu has it")
    add("--batch", type=int, required=True, help="images on the device")
    add("--num-classes", type=int, default=1000, help="classes (default %(default)s)")
    add("--split", type=int, help="micro-batches of ours (default: those that cost least)")
    add(
        "--estimate-only",
        action="store_true",
        help="with --jax-only: count no bundles, which is quicker",
    )
    add("--jax-only", action="store_true", help="compile JAX's step alone")
    add("--jax-split", type=int, default=1, help="micro-batches of JAX's (default %(default)s)")
    add(
        "--attention-block",
        type=int,
        default=0,
        help="images whose attention JAX computes at once, in a loop; 0: all",
    )
    add("--json", type=Path, help="write the figures here")
    add("--time-limit", type=float, default=3600.0, help="seconds that a compilation may take")
    return parser.parse_known_args(argv)


def run(options: argparse.Namespace, flags: list[str]) -> int:
    """Compile both steps and compare them."""
    require_at_least(1, options, "time_limit")
    config = load_config(["--config", str(options.config), *flags])
    prepare_file(options.json, "--json")
    if options.estimate_only and not options.jax_only:
        raise UserError("--estimate-only would leave kernels of ours out; give --jax-only, too")
    target = parse_target(options.target, 1, compiler=options.compiler)
    require_compiler(target.compiler)
    compilation = step_report.Compilation(config, target, 1, options.batch)
    request = describe_vision(config, options)
    figures = {"jax": measure_jax(request, compilation, options)}
    if not options.jax_only:
        figures["ours"] = measure_ours(compilation, options, flags)
    names = [name for name in _FIGURES if name in figures["jax"]]
    for name in names:
        print(f"{name:<18}", *(f"{kind} {row[name]:10.3f}  " for kind, row in figures.items()))
    if options.json:
        content = {**figures, "request": request}
        write_json(options.json, content)
    if options.jax_only:
        return 0
    ratios = {name: figures["ours"][name] / figures["jax"][name] for name in names}
    print(f"{'ratio':<18}", *(f"{name} {ratio:.3f}x" for name, ratio in ratios.items()))
    return int(any(ratios.get(name, 0.0) > 1.0 for name in _FIGURES[:2]))


def describe_vision(config: RunConfig, options: argparse.Namespace) -> JsonObject:
    """Describe the sizes of the run's step, as the child takes them.

    Raises:
      UserError: the JAX program does not support the run.
    """
    classes = options.num_classes
    student = create_model(config.model, device="meta", num_classes=classes)
    taught = get_teacher_sections(config.distill)
    others = {
        "train.task": (config.train.task, "classify"),
        "optim.name": (config.optim.name, "adamw"),
        "optim.max_grad_norm": (config.optim.max_grad_norm, None),
        "runtime.precision": (config.runtime.precision, "bf16"),
        "train.ema": (config.train.ema, False),
        "distill.loss": (config.distill.loss, "kd" if taught else ""),
        "distill.losses": (config.distill.losses, ()),
        "distill.teachers": (len(taught), min(len(taught), 1)),
    }
    for key, (value, only) in others.items():
        if value != only:
            raise UserError(f"{key} ({value!r}) is not in the JAX program; give {only!r}")
    described = _describe_model(student, config.model.name, "model.name")
    if described["kind"] == "resnet":
        for key, count in {
            "distill.teachers": len(taught),
            "--jax-split": options.jax_split - 1,
            "--attention-block": options.attention_block,
        }.items():
            if count:
                raise UserError(f"{key} is not in the JAX program of a ResNet; leave it out")
        return {"batch": options.batch, "classes": classes, "student": described}
    return {
        "batch": options.batch,
        "classes": classes,
        "parts": options.jax_split,
        "attention_block": options.attention_block,
        "alpha": config.distill.alpha if taught else 0.0,
        "teacher": _describe_teacher(taught[0], classes) if taught else None,
        "teacher_parts": taught[0].parts if taught else 1,
        "temperature": config.distill.temperature,
        "student": described,
    }


def _describe_teacher(section: TeacherSection, classes: int) -> JsonObject:
    """Sizes of a teacher."""
    arguments = {"num_classes": classes, **section.args}
    built = build_model(section.model, arguments, key="distill.teacher", device="meta")
    described = _describe_model(built, section.model, "distill.teacher")
    if described["kind"] == "resnet":
        raise UserError(f"distill.teacher ({section.model}) is not in the JAX program; give a ViT")
    return described


def _describe_model(model: Any, name: str, key: str) -> JsonObject:
    """Sizes of timm's model, which is on the meta device."""
    kind = _KINDS.get(type(model).__name__)
    if kind is None or (kind == "resnet" and name not in _RESNETS):
        known = f"ViTs, Mixers and {', '.join(_RESNETS)}"
        raise UserError(f"{key} ({name}) is not in the JAX program; it has {known}")
    if kind == "resnet":
        stages = (model.layer1, model.layer2, model.layer3, model.layer4)
        depths, side = [len(stage) for stage in stages], model.pretrained_cfg["input_size"][-1]
        return {"kind": kind, "image": side, "width": model.conv1.out_channels, "depths": depths}
    first, patches = model.blocks[0], model.stem if kind == "mixer" else model.patch_embed
    facts = {
        "kind": kind,
        "image": patches.img_size[0],
        "patch": patches.patch_size[0],
        "depth": len(model.blocks),
        "width": patches.proj.out_channels,
        "prefix": getattr(model, "num_prefix_tokens", 0),
        "mixing": 0,
        "heads": 0,
    }
    if kind == "mixer":
        mixing, hidden = first.mlp_tokens.fc1.out_features, first.mlp_channels.fc1.out_features
        return {**facts, "hidden": hidden, "mixing": mixing}
    return {**facts, "hidden": first.mlp.fc1.out_features, "heads": first.attn.num_heads}


def measure_jax(
    request: JsonObject, compilation: Compilation, options: argparse.Namespace
) -> dict[str, float]:
    """Figures of JAX's step.

    Raises:
      UserError: it does not fit, so it has no cost.
    """
    name = "resnet_child.py" if request["student"]["kind"] == "resnet" else "vision_child.py"
    compiled = compile_jax(
        _CHILDREN / name,
        request,
        compilation,
        time_limit_s=options.time_limit,
        with_bundles=not options.estimate_only,
    )
    return _read(step_report.describe(compilation, *compiled, "JAX", []), compilation)


def measure_ours(
    compilation: Compilation, options: argparse.Namespace, flags: list[str]
) -> dict[str, float]:
    """Figures of the run's own step, split as asked or as it costs least."""
    options.assume, options.hlo, options.cache_dir, options.write = (), None, None, False
    options.bundles, options.micro_batches, options.rest = True, True, flags
    if options.split is None:
        report = step_report.find_micro_batches(compilation, options)
    else:
        split = step_report.split(compilation, options.split)
        report = step_report.create_report(split, options)
    return _read(report, compilation)


def _read(report: Report, compilation: Compilation) -> dict[str, float]:
    if not report.fits:
        raise UserError(
            f"--batch ({compilation.batch}) does not fit {compilation.target.name}; lower it"
        )
    lonely = report.bundles.unestimated_mcycles if report.bundles else 0.0
    assert report.estimated_mcycles is not None and report.flops is not None  # it fits
    figures: JsonObject = {
        "estimated_mcycles": report.estimated_mcycles + lonely,
        "tflop": report.flops / 1e12,
        "peak_gib": report.memory.peak_bytes / 2**30,
        "compile_s": report.compile_s,
    }
    if report.bundles:
        figures["bundles_mcycles"] = report.bundles_mcycles
        figures["matrix_mcycles"] = report.bundles.matrix_mcycles
        figures["dma_gb"] = (report.bundles.dma_bytes + report.bundles.async_bytes) / 1e9
    return figures


if __name__ == "__main__":
    sys.exit(main())
