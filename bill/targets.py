"""What to compile for: slices of a TPU generation, as a person writes and libtpu takes them."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from utils.errors import UserError, get_hint
from utils.generations import GENERATIONS, Generation, get_sides

# Chips of the slices that are chosen where a target names no sides, by its dimensions.
_SIZES = {2: (1, 4, 8, 16, 32, 64, 128), 3: (4, 8, 16, 32, 64)}
_TARGET = re.compile(r"^(\w+)(?::(\d+x\d+(?:x\d+)?))?$")
_HOST_SIDE = 2
# Chips of the largest slice.
_LARGEST = {
    "v2": 256,
    "v3": 1024,
    "v4": 4096,
    "v5e": 256,
    "v5p": 6144,
    "v6e": 256,
    "tpu7x": 9216,
}
# Releases of libtpu: the one that torch_xla names, and the newest that was tried.
OWN, NEWEST = COMPILERS = ("own", "newest")
_NEWEST_ALONE = ("tpu7x",)


@dataclass(frozen=True)
class Target:
    """A slice of one generation, and the release of the compiler for it."""

    generation: Generation
    sides: tuple[int, ...]
    compiler: str = OWN

    @property
    def name(self) -> str:
        """As it was asked for, such as `v5e:2x2`."""
        return f"{self.generation.name}:{'x'.join(map(str, self.sides))}"

    @property
    def topology(self) -> str:
        """The name that libtpu takes: always three sides, and whole hosts of 2 x 2 chips."""
        sides = (*(max(side, _HOST_SIDE) for side in self.sides[:2]), *self.sides[2:], 1)[:3]
        return f"{self.generation.name}:{'x'.join(map(str, sides))}"

    @property
    def devices(self) -> int:
        """Devices of the slice."""
        return math.prod(self.sides) * self.generation.devices_per_chip

    @property
    def usable_bytes(self) -> int:
        """HBM of a device that a program may use."""
        return int(self.generation.usable_gib * 2**30)


def parse_target(text: str, chips: int = 1, flag: str = "--target", compiler: str = OWN) -> Target:
    """Parse `v5e:2x2`, or `v5e` for the smallest slice that holds the chips.

    Raises:
      UserError: not a target, of no slice that there is, or too small.
    """
    match = _TARGET.match(text)
    generation = GENERATIONS.get(match[1]) if match else None
    if match is None or generation is None:
        raise UserError(
            f"unknown {flag} {text!r}; use {list_targets()}; "
            f"{get_hint(text.partition(':')[0], list(GENERATIONS))}"
        )
    if match[2]:
        sides = tuple(int(side) for side in match[2].split("x"))
    else:
        sides = _choose_sides(generation, chips)
    if len(sides) > generation.dimensions and sides[generation.dimensions] != 1:
        raise UserError(f"{flag} {text!r} has {len(sides)} sides; slices are {list_targets()}")
    _check_sides(f"{flag} {text!r}", generation, sides)
    if generation.name in _NEWEST_ALONE and compiler == OWN:
        raise UserError(
            f"{flag} {text!r} is not known to the compiler of torch_xla; give --compiler {NEWEST} "
            "to tools.compile_for_tpu"
        )
    target = Target(generation, sides, compiler)
    if chips > target.devices:
        larger = Target(generation, _choose_sides(generation, chips))
        raise UserError(
            f"--chips ({chips}) exceeds the {target.devices} devices of {flag} {text!r}; use "
            f"{flag} {larger.name}"
        )
    return target


def list_targets() -> str:
    """List the accepted targets, for a message."""
    shapes = {2: "AxB", 3: "AxBxC"}
    return ", ".join(f"{g.name}:{shapes[g.dimensions]}" for g in GENERATIONS.values())


def _check_sides(asked: str, generation: Generation, sides: tuple[int, ...]) -> None:
    """Refuse sides that no slice has: the compiler does so late, in words of its own, or never."""
    largest = _LARGEST[generation.name]
    if generation.dimensions == 2:
        known = [2**power for power in range(math.isqrt(largest).bit_length())]
        rule = f"powers of 2 up to {known[-1]}"
    else:
        known = [1, 2, *range(4, largest, 4)]
        rule = "1, 2, or multiples of 4"
    wrong = [side for side in sides if side not in known]
    if wrong:
        raise UserError(f"{asked} is no slice: sides of {generation.name} are {rule}; change it")
    if math.prod(sides) > largest:
        raise UserError(
            f"{asked} is no slice: {generation.name} has at most {largest} chips; lower it"
        )


def _choose_sides(generation: Generation, chips: int) -> tuple[int, ...]:
    sizes = _SIZES[generation.dimensions]
    needed = math.ceil(chips / generation.devices_per_chip)
    for size in sizes:
        if size >= needed:
            return get_sides(size, generation.dimensions)
    raise UserError(
        f"--chips ({chips}) is more than {sizes[-1]} chips; compile 16 or 64, the work of a chip "
        "is the same"
    )
