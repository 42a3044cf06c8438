"""What programs cost on a TPU that is not there: compiled, their bundles counted."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel

from bill import compiler
from bill.bundles.chip import get_chip_model
from bill.bundles.counting import ProgramCost, count_listings, count_program
from bill.hlo import get_hbm_bytes, list_instructions, read_module
from bill.targets import Target, list_targets, parse_target
from utils.config.devices import DEVICES
from utils.config.execution import RuntimeSection
from utils.errors import UserError, get_hint
from utils.generations import GENERATIONS
from utils.json_types import JsonObject
from utils.runtime.choice import choose_device
from utils.runtime.start import get_start

# Where a lab takes times; elsewhere it compiles for a TPU and counts.
HERE = tuple(DEVICES)
# What `--on` takes, for its help.
PLACES = (
    f"{', '.join(HERE)}, auto for the device that is here, or a TPU to compile for: "
    f"{', '.join(GENERATIONS)}, or a slice of one, such as v5e:2x2"
)
_CHILD = Path(__file__).with_name("jax_child.py")


class _NoAnswer(BaseModel):
    """Answer of `jax_child.py`, which writes arrays and artifacts into files of their own."""


@dataclass(frozen=True)
class CompiledCost:
    """A program on one device."""

    program: ProgramCost
    bytes_by_space: int  # HBM bytes by the memory space of arrays, for what has no listing, too
    peak_bytes: int  # of memory, arguments and results included
    compile_s: float
    hlo_lines: int  # of the compiled program


def resolve_place(on: str) -> str:
    """Return the device behind `--on auto`, another value as it is; set its environment.

    Raises:
      UserError: the device that is here cannot be used.
    """
    if on == "auto":
        on = choose_device(RuntimeSection())
    if on in HERE:
        get_start(on).prepare_environment()
    return on


def choose_target(on: str) -> Target | None:
    """Return the TPU that `--on` names, or None if times are taken here.

    Raises:
      UserError: it names neither.
    """
    if on in HERE:
        return None
    name = on.partition(":")[0]
    if name not in GENERATIONS:
        raise UserError(
            f"unknown --on {on!r}; use {', '.join(HERE)}, {list_targets()}; "
            f"{get_hint(name, [*HERE, *GENERATIONS])}"
        )
    return parse_target(on, flag="--on")


def compile_program(artifact: bytes, target: Target, *, time_limit_s: float) -> CompiledCost:
    """Compile an artifact and count its bundles.

    Raises:
      UserError: the compiler refused, aborted or took too long.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compiled = compiler.compile_artifact(artifact, target, folder, time_limit_s=time_limit_s)
        instructions = list_instructions(read_module(compiled.hlo))
        model = get_chip_model(target.generation)
        program = count_program(instructions, count_listings(folder / "bundles", model), model)
    return CompiledCost(
        program=program,
        bytes_by_space=get_hbm_bytes(instructions),
        peak_bytes=sum(map(compiled.facts.get_bytes, ("argument", "output", "temp"))),
        compile_s=compiled.facts.compile_s,
        hlo_lines=compiled.hlo.count("\n"),
    )


def export_in_jax(
    programs: Sequence[JsonObject], target: Target, *, time_limit_s: float
) -> list[bytes]:
    """Artifacts of programs that `jax_child.py` knows.

    Raises:
      UserError: one cannot be exported.
    """
    with tempfile.TemporaryDirectory() as name:
        places = [Path(name, f"{number}.bin") for number in range(len(programs))]
        named = [
            {**program, "artifact": str(place)}
            for program, place in zip(programs, places, strict=True)
        ]
        compiler.run_script(_CHILD, {"programs": named}, target, time_limit_s, _NoAnswer)
        return [place.read_bytes() for place in places]


def run_in_jax(
    program: JsonObject, places: tuple[Path, Path], target: Target, *, time_limit_s: float
) -> None:
    """Run such a program on JAX's CPU: arrays of the first file into the second.

    Raises:
      UserError: it failed.
    """
    request = {**program, "given": str(places[0]), "found": str(places[1])}
    compiler.run_script(_CHILD, {"programs": [request]}, target, time_limit_s, _NoAnswer)
