"""Holds a language run's step against the same step in plain JAX, by the TPU compiler's estimate.

    python -m proofs.jax_decoder --config configs/x.yaml --target v5e:1x1 --batch 8

Both are compiled by the same libtpu for the same slice: ours as the engine traces it, with its
patches; JAX's as `bill/children/decoder_child.py` writes it: bfloat16 compute, float32 weights,
AdamW, clipping, the loss in the same chunks, its softmax in --softmax. Exit code 1: ours costs
more.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from bill import analysis, step_report
from bill.compiler import require_compiler
from bill.hlo import get_hbm_bytes
from bill.targets import parse_target
from bill.yardstick import compile_jax
from losses.tasks.chunked import choose_chunk
from models.transformer import TransformerShape
from tasks.language.synthetic import SyntheticLanguage
from utils.config.load import load_config
from utils.errors import UserError
from utils.programs import create_program_parser, prepare_file, require_at_least, run_program
from utils.storage.json_files import write_json

if TYPE_CHECKING:
    from bill.compiled import Compiled
    from bill.step.tracing import StepExport
    from bill.step_report import Compilation
    from utils.config.load import RunConfig
    from utils.json_types import JsonObject

_CHILD = Path(__file__).resolve().parents[1] / "bill" / "children" / "decoder_child.py"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse flags, compile both, print; gives the exit code."""
    return run_program(run, *parse_arguments(argv))


def parse_arguments(argv: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Parse the tool's own flags, and those of main.py that change the run."""
    parser = create_program_parser(__doc__, prog="python -m proofs.jax_decoder", allow_abbrev=False)
    add = parser.add_argument
    add("--config", type=Path, required=True, help="the run's YAML")
    add("--target", default="v5e:1x1", help="generation and slice (default %(default)s)")
    add("--chips", type=int, default=1, help="devices to partition over (default %(default)s)")
    add("--batch", type=int, required=True, help="windows on each device")
    add(
        "--softmax",
        choices=("float32", "bfloat16"),
        default="float32",
        help="type of JAX's scores (default %(default)s)",
    )
    add("--vocab-size", type=int, help="tokens of a dataset that is not here")
    add("--json", type=Path, help="write the figures here")
    add("--time-limit", type=float, default=1800.0, help="seconds that a compilation may take")
    return parser.parse_known_args(argv)


def run(options: argparse.Namespace, flags: list[str]) -> int:
    """Compile both steps and compare them."""
    require_at_least(1, options, "time_limit")
    config = load_config(["--config", str(options.config), *flags])
    given = {} if options.vocab_size is None else {"vocab_size": options.vocab_size}
    prepare_file(options.json, "--json")
    require_compiler()
    target = parse_target(options.target, options.chips)
    compilation = step_report.Compilation(config, target, options.chips, options.batch)
    request = describe_decoder(config, options, given)
    options.assume = [f"{name}={number}" for name, number in given.items()]
    options.num_classes = options.cache_dir = None
    options.bundles = options.micro_batches = False
    figures = {
        "ours": measure(*step_report.trace_and_compile(compilation, options), compilation),
        "jax": measure(
            *compile_jax(_CHILD, request, compilation, time_limit_s=options.time_limit), compilation
        ),
    }
    ratios = {name: figures["ours"][name] / figures["jax"][name] for name in figures["jax"]}
    for name, ratio in ratios.items():
        ours, theirs = (figures[kind][name] for kind in ("ours", "jax"))
        print(f"{name:<12} ours {ours:10.3f}   JAX {theirs:10.3f}   {ratio:.3f}x")
    if options.json:
        content = {**figures, "ratios": ratios, "request": request}
        write_json(options.json, content)
    return int(ratios["mcycles"] > 1.0)


def describe_decoder(
    config: RunConfig, options: argparse.Namespace, given: dict[str, int]
) -> JsonObject:
    """Describe the sizes of the run's step, as the child takes them.

    Raises:
      UserError: the JAX program does not support the run.
    """
    shape = TransformerShape(**config.model.args)
    known = {
        "train.task": (config.train.task, "language"),
        "model.name": (config.model.name, "transformer"),
        "model.args.positions": (shape.positions, "rope"),
        "model.args.tied": (shape.tied, True),
        "optim.name": (config.optim.name, "adamw"),
        "optim.max_grad_norm": (config.optim.max_grad_norm, 1.0),
        "runtime.precision": (config.runtime.precision, "bf16"),
        "train.accumulate_steps": (config.train.accumulate_steps, 1),
        "train.ema": (config.train.ema, False),
    }
    for key, (value, only) in known.items():
        if value != only:
            raise UserError(f"{key} ({value!r}) is not in the JAX program; give {only!r}")
    vocab = SyntheticLanguage(config, given).vocabulary
    length = config.data.sequence_length
    return {
        "devices": options.chips,
        "batch": options.batch,
        "length": length,
        "vocab": vocab,
        "depth": shape.depth,
        "width": shape.width,
        "heads": shape.heads,
        "kv_heads": shape.num_kv_heads,
        "hidden": shape.hidden_width,
        "softmax": options.softmax,
        "chunk": choose_chunk(options.batch, length, vocab, config.train.logits_mib),
    }


def measure(export: StepExport, compiled: Compiled, compilation: Compilation) -> dict[str, float]:
    """Mcycles, memory, FLOPs, traffic and all-reduced bytes of a device.

    Raises:
      UserError: the program does not fit, so it has no cost.
    """
    if compiled.needed_bytes is not None:
        raise UserError(
            f"--batch ({compilation.batch}) does not fit {compilation.target.name}; lower it"
        )
    instructions = analysis.read_instructions(compiled)
    memory = analysis.get_memory(compiled, export, compilation.target, instructions)
    facts = {
        "mcycles": analysis.sum_mcycles(instructions),
        "peak_gib": memory.peak_bytes / 2**30,
        "tflop": compiled.facts.flops / 1e12,
        "hbm_gb": get_hbm_bytes(instructions) / 1e9,
    }
    if compilation.chips > 1:
        moved = sum(collective.bytes for collective in analysis.list_collectives(instructions))
        facts["collectives_mb"] = moved / 1e6
    return facts


if __name__ == "__main__":
    sys.exit(main())
