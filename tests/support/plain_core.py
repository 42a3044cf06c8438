"""A second scalar core that interprets a listing's text, to check the fast one against."""

from __future__ import annotations

import functools
import re
from collections import defaultdict, deque
from collections.abc import Callable, Sequence

from bill.bundles.chip import ChipModel, HbmTraffic, Transfer
from bill.bundles.listing import Bundle, ScalarStep
from bill.bundles.machine import EndlessProgramError, Execution

_MASK = 0xFFFFFFFF
_LIMIT = 20_000_000
# A described transfer: granules in the low half of a word, a mark on the flag's, and what says that
# a side is HBM; as they stand in listings for v3.
_SIZE, _FLAG_MARK, _IN_HBM = 0xFFFF, 0x1C00, 0x200
_SYMBOL = re.compile(r"\[#(\w+)(?:\s*\+\s*\$?(\w+))?\]")
_STORED = re.compile(r"\]\s*(\S+)$")
# Symbols stand this far apart, so that sums of one and an offset are no other.
_SPACING = 1 << 24


class PlainCore:
    """The scalar core of one device, which reads each step anew whenever it is issued."""

    def __init__(self, bundles: Sequence[Bundle], model: ChipModel) -> None:
        self.bundles = bundles
        self.model = model
        self.memory = HbmTraffic(model)
        self.found = Execution()
        self.registers: dict[str, int | None] = {}
        self.spaces: dict[str, str] = {}
        self.stored: dict[str, int | None] = {}
        self.symbols: dict[str, int] = {}
        self.flags: defaultdict[int | None, deque[Transfer]] = defaultdict(deque)

    def run(self) -> Execution:
        """Issue bundles until the listing's end.

        Raises:
          EndlessProgramError: it has none.
        """
        end = len(self.bundles)
        following = self._find_following()
        changes = [0] * (end + 1)
        place, turns, jump = 0, 0, (end + 1, 0)
        while place < end or place == jump[0]:
            if place == jump[0]:
                place, jump = jump[1], (end + 1, 0)
                continue
            stop = min(following[place], jump[0])
            if stop == place:
                stop = place + 1
            changes[place] += 1
            changes[stop] -= 1
            self.found.cycles += stop - place
            target = self._issue(self.bundles[place]) if stop == place + 1 else -1
            if target >= 0 and jump[0] > end:
                jump = (place + 1 + self.model.delay_slots, target)
            place, turns = stop, turns + 1
            if turns > _LIMIT:
                raise EndlessProgramError(f"no end after {_LIMIT} turns")
        total = 0
        for change in changes[:end]:
            total += change
            self.found.counts.append(total)
        return self.found

    def _find_following(self) -> list[int]:
        """The next bundle from each on that has something to do here."""
        end = len(self.bundles)
        following = [end] * (end + 1)
        for place in range(end - 1, -1, -1):
            following[place] = place if self.bundles[place].steps else following[place + 1]
        return following

    def _issue(self, bundle: Bundle) -> int:
        """Carry out one bundle; the place that it branches to, or -1. All read before any write."""
        writes: list[tuple[str, int | None]] = []
        target = -1
        for step in bundle.steps:
            guard = self._read(step.guard) if step.guard else 1
            if step.root == "sbr":
                self.found.unknown += guard is None
                target = step.target if guard else target
            elif step.root == "dma":
                self._move(step, guard)
            elif step.root == "sst":
                self._store(step, guard)
            elif step.result and step.root not in ("sphi", "pphi"):
                writes.append((step.result, self._choose(step, guard)))
                self._note_space(step)
        for result, value in writes:
            self.registers[_get_register(result)] = value
        return target

    def _choose(self, step: ScalarStep, guard: int | None) -> int | None:
        """A result: what is computed, or what stands there without the guard."""
        kept = self._read(step.kept) if step.kept else None
        if guard == 0:
            return kept if step.kept else self.registers.get(_get_register(step.result))
        value = self._compute(step)
        return value if guard or value == kept else None

    def _compute(self, step: ScalarStep) -> int | None:
        root = step.root
        if root == "scalar_select":
            picked = self._read(step.named["predicate"])
            return (
                None
                if picked is None
                else self._read(step.named["on_true" if picked else "on_false"])
            )
        if root == "sld":
            number = step.named.get("identity")
            return int(number) if number else self.stored.get(self._find_address(step.operands[0]))
        if root == "inlined_call_operand":
            return self._name(step.result)
        values = [self._read(one) for one in step.operands]
        if root in _LOGIC:
            return _LOGIC[root](values)
        if root == "scmp":
            return _compare(step.opcode, values)
        if None in values or root not in _ARITHMETIC:
            return None
        return _ARITHMETIC[root](values)

    def _read(self, text: str) -> int | None:
        """A register's value, a number, or a symbol's address."""
        text = text.strip()
        if text.startswith("!"):
            value = self._read(text[1:])
            return None if value is None else int(not value)
        if text.startswith("%"):
            return self.registers.get(_get_register(text[1:]))
        symbol = _SYMBOL.match(text)
        if symbol:
            return self._name(symbol[1]) + (int(symbol[2], 0) if symbol[2] else 0)
        try:
            return int(text.partition(" ")[0], 0)
        except ValueError:
            return None

    def _name(self, symbol: str) -> int:
        """The made-up address of a symbol."""
        return self.symbols.setdefault(symbol, (len(self.symbols) + 1) * _SPACING)

    def _find_address(self, text: str) -> str:
        """A place of scalar memory as one word, registers by their values."""
        return re.sub(r"%\w+", lambda one: str(self._read(one[0])), text.replace("smem:", ""))

    def _store(self, step: ScalarStep, guard: int | None) -> None:
        text = " ".join(step.operands)
        value = _STORED.search(text)
        if guard and value:
            place = self._find_address(text[: value.start() + 1])
            self.stored[place] = self._read(value[1])

    def _note_space(self, step: ScalarStep) -> None:
        if step.root == "int_to_ptr":
            self.spaces[_get_register(step.result)] = step.opcode.partition(".")[2]

    def _move(self, step: ScalarStep, guard: int | None) -> None:
        """Issue a transfer, or wait for some."""
        if guard is None:
            self.found.unknown += 1
        if not guard:
            return
        if step.opcode.startswith("dma.done"):
            self._wait(self._read(step.operands[0]), self._read(step.operands[1]))
            return
        size, flag, is_of_hbm = (
            self._read_descriptor(step.operands[0])
            if step.opcode == "dma"
            else self._read_transfer(step)
        )
        if size is None:
            self.found.unknown += 1
        elif is_of_hbm:
            self.found.hbm_bytes += size * self.model.granule_bytes
            self.found.transfers += 1
            self.flags[flag].append(self.memory.issue(self.found.cycles, size))

    def _read_transfer(self, step: ScalarStep) -> tuple[int | None, int | None, bool]:
        """Granules, flag and whether HBM is a side of it."""
        size = self._read(step.named.get("size_in_granules", ""))
        flag = self._read(step.named.get("dst_syncflagno", ""))
        return size, flag, self._is_of_hbm(step)

    def _read_descriptor(self, text: str) -> tuple[int | None, int | None, bool]:
        """The same of eight words in scalar memory, as v2 and v3 describe what has strides."""
        table = text.strip("[]")
        words = [self.stored.get(f"[[{table} + $0x{place}]]") for place in range(1, 8)]
        spaces, size, flag = (words[0], words[3]), words[5], words[6]
        return (
            None if size is None else size & _SIZE,
            None if flag is None else flag & _MASK & ~_FLAG_MARK,
            any(space is None or space & _IN_HBM for space in spaces),
        )

    def _is_of_hbm(self, step: ScalarStep) -> bool:
        """Whether one side is HBM; a general transfer tells by what its pointers are."""
        if step.opcode != "dma.general":
            return "hbm" in step.opcode
        sides = [step.named.get(name, "") for name in ("src", "dst")]
        known = [self.spaces.get(_get_register(side.strip("%"))) for side in sides]
        return "hbm" in known or None in known

    def _wait(self, flag: int | None, granules: int | None) -> None:
        """Until so much has come that signals a flag."""
        waiting, come = self.flags[flag], 0
        while waiting and (granules is None or come < granules):
            transfer = waiting.popleft()
            come += transfer.granules
            late = self.memory.finish(transfer) - self.found.cycles
            if late > 0:
                self.found.waited += late
                self.found.cycles += late


@functools.cache
def _get_register(name: str) -> str:
    """The register of `s68965_s11`, which is `s11`: what the allocator has made of a value."""
    return name.rpartition("_")[2]


def _sign(value: int) -> int:
    value &= _MASK
    return value - (1 << 32) if value >> 31 else value


def _compare(opcode: str, values: Sequence[int | None]) -> int | None:
    """0 or 1 of two values; none: one is not known."""
    if None in values:
        return None
    _, relation, kind, *_ = opcode.split(".")
    left, right = (one & _MASK if kind == "u32" else _sign(one) for one in values)
    found = {
        "eq": left == right,
        "ne": left != right,
        "lt": left < right,
        "le": left <= right,
        "gt": left > right,
        "ge": left >= right,
    }
    return int(found[relation])


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
_ARITHMETIC: dict[str, Callable[[list[int]], int]] = {
    "smov": lambda values: values[0],
    "pmov": lambda values: values[0],
    "int_to_ptr": lambda values: values[0],
    "scalar_lea": lambda values: values[0] + (values[1] if len(values) > 1 else 0),
    "sadd": lambda values: _sign(values[0] + values[1]),
    "ssub": lambda values: _sign(values[0] - values[1]),
    "smul": lambda values: _sign(values[0] * values[1]),
    "sand": lambda values: _sign(values[0] & values[1]),
    "sor": lambda values: _sign(values[0] | values[1]),
    "sxor": lambda values: _sign(values[0] ^ values[1]),
    "sneg": lambda values: _sign(-values[0]),
    "snot": lambda values: _sign(~values[0]),
    "sshll": lambda values: _sign(values[0] << (values[1] & 31)),
    "sshrl": lambda values: _sign((values[0] & _MASK) >> (values[1] & 31)),
    "sshra": lambda values: _sign(values[0]) >> (values[1] & 31),
    "smin": min,
    "smax": max,
    # The remainder, which picks one of several buffers; the unit's other result is not used.
    "sdivrem": lambda values: (values[0] & _MASK) % values[1] if values[1] else 0,
    "spop": lambda values: values[0],
}
