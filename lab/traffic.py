"""What a convolutional model's step must move through HBM if nothing stays on the chip.

    python -m lab.traffic --model resnet50 --batch 128 --target v5e:1x1

Counts the activations of every convolution in bfloat16, as a step with BatchNorm moves them at
least when each operation reads its inputs and writes its results once: a norm's sums come from the
convolution that writes the values, and normalising, ReLU and their backward happen where the next
convolution reads. Weights, optimizer and the sums of residual branches are left out. So it is a
floor of what is compiled operation by operation, and of nothing that keeps values on the chip.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from bill.targets import parse_target
from models.factory import build_model
from utils.programs import CommandLine, create_program_parser, prepare_file
from utils.storage.json_files import write_json

_BYTES = 2
KINDS = ("forward", "sums", "weight_gradient", "input_gradient", "total", "both_at_once")


def create_parser() -> argparse.ArgumentParser:
    """Create the command line."""
    parser = create_program_parser(__doc__, prog="python -m lab.traffic")
    add = parser.add_argument
    add("--model", default="resnet50", help="timm's name (default %(default)s)")
    add("--batch", type=int, default=128, help="images of a step (default %(default)s)")
    add("--target", default="v5e:1x1", help="generation and slice (default %(default)s)")
    add("--json", type=Path, help="write the rows here")
    return parser


def run(options: argparse.Namespace) -> int:
    """Print a row for each stage and their sum."""
    prepare_file(options.json, "--json")
    bandwidth = parse_target(options.target, 1).generation.hbm_gb_per_s
    rows = count_traffic(options.model, options.batch)
    whole = sum(rows.values(), Counter[str]())
    print(f"{'stage':<10} {'convolutions':>12} " + " ".join(f"{name:>15}" for name in KINDS))
    for stage, row in {**rows, "all": whole}.items():
        cells = " ".join(f"{row[name] / 1e9:15.2f}" for name in KINDS)
        print(f"{stage:<10} {row['convolutions']:12} {cells}")
    times = " or ".join(f"{whole[name] / 1e6 / bandwidth:.1f}" for name in KINDS[-2:])
    print(
        f"GB of a step; at {bandwidth:.0f} GB/s {times} ms, with a convolution's two gradients "
        "apart or in one operation"
    )
    if options.json:
        write_json(options.json, rows)
    return 0


def count_traffic(model: str, batch: int) -> dict[str, Counter[str]]:
    """Bytes of each stage's convolutions by what moves them; nothing is computed."""
    import torch
    from torch import nn

    network: Any = build_model(model, {"num_classes": 1000}, key="--model", device="meta")
    images = torch.empty(batch, *network.default_cfg["input_size"], device="meta")
    rows: dict[str, Counter[str]] = {}

    def watch(name: str, module: nn.Module) -> None:
        def note(_: nn.Module, given: tuple[torch.Tensor], found: torch.Tensor) -> None:
            # Nobody asks for the gradient of the images, and one byte holds each of their values.
            of_images = given[0] is images
            inputs = 0 if of_images else _BYTES * given[0].numel()
            rows.setdefault(name.split(".", maxsplit=1)[0], Counter()).update(
                list_bytes(inputs, _BYTES * found.numel(), images.numel() * of_images)
            )

        module.register_forward_hook(note)

    for name, module in network.named_modules():
        if isinstance(module, nn.Conv2d):
            watch(name, module)
    network(images)
    return rows


def list_bytes(inputs: int, outputs: int, images: int = 0) -> dict[str, int]:
    """Count the bytes that one convolution and the norm behind it move.

    Args:
      inputs: bytes of its input, which has a gradient; 0: it has none.
      images: bytes of an input without gradient.
    """
    sizes = {
        "forward": inputs + images + outputs,
        "sums": outputs,
        "weight_gradient": inputs + images + 2 * outputs,
        "input_gradient": inputs + 2 * outputs if inputs else 0,
    }
    total = sum(sizes.values())
    # Both gradients read the outputs and what came back to them.
    shared = 2 * outputs if inputs else 0
    return {**sizes, "total": total, "both_at_once": total - shared, "convolutions": 1}


main = CommandLine(create_parser, run)

if __name__ == "__main__":
    sys.exit(main())
