"""Makes a function of each scalar step, so that what is issued a million times is read once."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from bill.bundles.listing import ScalarStep

# Returns the current value; None if it depends on data.
Read = Callable[[], int | None]

_MASK, _HALF = 0xFFFFFFFF, 0x80000000
_SYMBOL = re.compile(r"\[#(\w+)(?:\s*\+\s*\$?(\w+))?\]")
_STORED = re.compile(r"\]\s*(\S+)$")
_REGISTER = re.compile(r"%\w+")
# Symbols are this far apart, so that a symbol plus an offset never equals another one.
_SPACING = 1 << 24


@dataclass
class ScalarState:
    """State that scalar steps read and write."""

    # Values by the names of registers; numbers and symbols stand there as well, under their own
    # text behind a `=`
    registers: dict[str, int | None] = field(default_factory=dict)
    # what the pointers of registers point into
    spaces: dict[str, str] = field(default_factory=dict)
    # Words of scalar memory by their address
    stored: dict[str, int | None] = field(default_factory=dict)
    symbols: dict[str, int] = field(default_factory=dict)  # synthetic addresses


def read_value(text: str, state: ScalarState) -> Read:
    """Create the reader of a register, a number, or a symbol's address."""
    text = text.strip()
    if text.startswith("!"):
        read = read_value(text[1:], state)
        return lambda: None if (value := read()) is None else int(not value)
    if text.startswith("%"):
        name = get_register(text[1:])
        state.registers.setdefault(name, None)
    else:
        name = f"={text}"
        state.registers[name] = _read_constant(text, state)
    return functools.partial(state.registers.__getitem__, name)


def read_result(step: ScalarStep, state: ScalarState) -> Read:
    """Create the function of a step: the computed value, or the old one if the guard is 0."""
    compute = _read_computed(step, state)
    if step.guard:
        compute = _choose(step, state, compute)
    return _note_space(step, state, compute) if step.root == "int_to_ptr" else compute


def _choose(step: ScalarStep, state: ScalarState, compute: Read) -> Read:
    guard = read_value(step.guard, state)
    kept = read_value(step.kept or f"%{step.result}", state)

    def choose() -> int | None:
        decided = guard()
        if decided:
            return compute()
        if decided is not None:
            return kept()
        # The guard depends on data, but both sides may be equal.
        value = compute()
        return value if step.kept and value == kept() else None

    return choose


def read_store(step: ScalarStep, state: ScalarState) -> Read:
    """Create a step that writes into scalar memory and returns nothing."""
    text = " ".join(step.operands)
    value = _STORED.search(text)
    if value is None:
        return lambda: None
    guard = read_value(step.guard or "1", state)
    address = _read_address(text[: value.start() + 1], state)
    read, stored = read_value(value[1], state), state.stored

    def store() -> None:
        if guard():
            stored[address()] = read()

    return store


@functools.cache
def get_register(name: str) -> str:
    """Return the register of a value: `s11` of `s68965_s11`, as the allocator chose it."""
    return name.rpartition("_")[2]


def _read_constant(text: str, state: ScalarState) -> int | None:
    symbol = _SYMBOL.match(text)
    if symbol:
        return _name(symbol[1], state) + (int(symbol[2], 0) if symbol[2] else 0)
    try:
        return int(text.partition(" ")[0], 0)
    except ValueError:
        return None


def _name(symbol: str, state: ScalarState) -> int:
    """Return the synthetic address of a symbol."""
    return state.symbols.setdefault(symbol, (len(state.symbols) + 1) * _SPACING)


def _note_space(step: ScalarStep, state: ScalarState, compute: Read) -> Read:
    name, space = get_register(step.result), step.opcode.partition(".")[2]

    def note() -> int | None:
        state.spaces[name] = space
        return compute()

    return note


def _read_computed(step: ScalarStep, state: ScalarState) -> Read:
    root = step.root
    if root == "scalar_select":
        sides = "predicate", "on_true", "on_false"
        return _select(*(read_value(step.named[side], state) for side in sides))
    if root == "sld":
        return _read_load(step, state)
    if root == "inlined_call_operand":
        # An operand is passed by its address: one that no other symbol has.
        address = _name(step.result, state)
        return lambda: address
    reads = [read_value(operand, state) for operand in step.operands]
    if root in _LOGIC:
        decide = _LOGIC[root]
        return lambda: decide([read() for read in reads])
    if root == "scmp":
        return _read_known(_compare(step.opcode), reads)
    if root in _COPIES:
        return reads[0]
    return _read_known(_ARITHMETIC[root], reads) if root in _ARITHMETIC else lambda: None


def _select(predicate: Read, on_true: Read, on_false: Read) -> Read:
    def select() -> int | None:
        picked = predicate()
        if picked is None:
            return None
        return on_true() if picked else on_false()

    return select


def _read_load(step: ScalarStep, state: ScalarState) -> Read:
    number = step.named.get("identity")
    if number:
        return read_value(number, state)
    address, get = _read_address(step.operands[0], state), state.stored.get
    return lambda: get(address())


def _read_address(text: str, state: ScalarState) -> Callable[[], str]:
    """Read an address of scalar memory as one word, registers by their values."""
    text = text.replace("smem:", "")
    reads = [read_value(register, state) for register in _REGISTER.findall(text)]
    first, *rest = _REGISTER.split(text)
    if not reads:
        return lambda: text
    if len(reads) == 1:
        (read,), (last,) = reads, rest
        return lambda: f"{first}{read()}{last}"
    pairs = list(zip(reads, rest, strict=True))
    return lambda: first + "".join(f"{read()}{between}" for read, between in pairs)


def _read_known(compute: Callable[..., int], reads: Sequence[Read]) -> Read:
    """Apply a function to values, or return None if one of them is unknown."""
    if len(reads) == 1:
        (alone,) = reads
        return lambda: None if (value := alone()) is None else compute(value)
    if len(reads) != 2:
        return lambda: None if None in (values := [read() for read in reads]) else compute(*values)
    read_left, read_right = reads

    def read() -> int | None:
        left, right = read_left(), read_right()
        return None if left is None or right is None else compute(left, right)

    return read


def _sign(value: int) -> int:
    """Wrap to a signed word of 32 bits."""
    return ((value + _HALF) & _MASK) - _HALF


def _compare(opcode: str) -> Callable[[int, int], int]:
    """Create a comparison of two words, which returns 0 or 1."""
    _, relation, kind, *_ = opcode.split(".")
    decide = getattr(operator, relation)
    if kind == "u32":
        return lambda left, right: int(decide(left & _MASK, right & _MASK))
    return lambda left, right: int(
        decide((left + _HALF) & _MASK, (right + _HALF) & _MASK)  # signed ones, all moved up
    )


def _and(values: Sequence[int | None]) -> int | None:
    if 0 in values:
        return 0
    return None if None in values else 1


def _or(values: Sequence[int | None]) -> int | None:
    if any(values):
        return 1
    return None if None in values else 0


def _not(value: int | None) -> int | None:
    return None if value is None else int(not value)


_LOGIC: dict[str, Callable[[list[int | None]], int | None]] = {
    "pand": _and,
    "por": _or,
    "pnand": lambda values: _not(_and(values)),
    "pnor": lambda values: _not(_or(values)),
    "pneg": lambda values: _not(values[0]),
    "pxor": lambda values: None if None in values else int(bool(values[0]) != bool(values[1])),
}


_COPIES = ("smov", "pmov", "int_to_ptr", "spop")
_OF_ONE: dict[str, Callable[[int], int]] = {
    "sneg": lambda value: _sign(-value),
    "snot": lambda value: _sign(~value),
}
_OF_TWO: dict[str, Callable[[int, int], int]] = {
    "sadd": lambda left, right: ((left + right + _HALF) & _MASK) - _HALF,
    "ssub": lambda left, right: _sign(left - right),
    "smul": lambda left, right: _sign(left * right),
    "sand": lambda left, right: _sign(left & right),
    "sor": lambda left, right: _sign(left | right),
    "sxor": lambda left, right: _sign(left ^ right),
    "sshll": lambda left, right: _sign(left << (right & 31)),
    "sshrl": lambda left, right: _sign((left & _MASK) >> (right & 31)),
    "sshra": lambda left, right: _sign(left) >> (right & 31),
    "smin": min,
    "smax": max,
    # The remainder, which picks one of several buffers; the unit's other result is not used.
    "sdivrem": lambda left, right: (left & _MASK) % right if right else 0,
}


def _add_offset(address: int, offset: int = 0, *_: int) -> int:
    return address + offset


_ARITHMETIC: dict[str, Callable[..., int]] = {**_OF_ONE, **_OF_TWO, "scalar_lea": _add_offset}
