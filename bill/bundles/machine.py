"""Runs the scalar part of a listing: loop counters, predicates, branches, transfers and waits.

So it is known how often each bundle is issued, how many bytes move and how long the core waits for
them. Vector data are never looked at. A branch whose predicate depends on them is not taken, and
counted.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from bill.bundles.chip import ChipModel, HbmTraffic, Transfer
from bill.bundles.listing import Bundle, ScalarStep
from bill.bundles.steps import Read, ScalarState, get_register, read_result, read_store, read_value

_MASK = 0xFFFFFFFF
_LIMIT = 200_000_000
# A described transfer: granules in the low half of a word, a mark on the flag's, and what says that
# a side is HBM; as they stand in listings for v3.
_SIZE, _FLAG_MARK, _IN_HBM = 0xFFFF, 0x1C00, 0x200


class EndlessProgramError(Exception):
    """A listing that does not come to its end."""


@dataclass
class Execution:
    """Result of running a listing."""

    counts: list[int] = field(default_factory=list)  # how often each bundle is issued
    cycles: float = 0.0  # bundles issued and cycles waited
    waited: float = 0.0  # cycles in which a transfer is waited for
    hbm_bytes: int = 0  # moved between HBM and the chip
    transfers: int = 0  # how many
    unknown: int = 0  # branches and transfers whose predicate or size depends on data


class ScalarCore:
    """The scalar core of one device."""

    def __init__(self, bundles: Sequence[Bundle], model: ChipModel) -> None:
        self.bundles = bundles
        self.model = model
        self.memory = HbmTraffic(model)
        self.execution = Execution()
        self.state = ScalarState()
        self.flags: defaultdict[int | None, deque[Transfer]] = defaultdict(deque)

    def run(self) -> Execution:
        """Issue bundles until the listing's end.

        Raises:
          EndlessProgramError: it has none.
        """
        end, execution = len(self.bundles), self.execution
        following = self._find_following()
        issues: list[Callable[[], int] | None] = [None] * end
        # Where counts of bundles grow and fall: each straight run is noted by its two ends.
        changes = [0] * (end + 1)
        # `begun`: first bundle of this straight run. `jump`: where a taken branch comes into force,
        # behind its delay slots; end + 1: no branch is pending.
        place, begun, turns = 0, 0, 0
        jump, target = end + 1, 0
        while place < end or place == jump:
            turns += 1
            if place == jump:
                changes[begun] += 1
                changes[place] -= 1
                place = begun = target
                jump = end + 1
                if turns > _LIMIT:
                    raise EndlessProgramError(f"no end after {_LIMIT} turns")
                continue
            # Bundles without scalar steps change nothing here: only their cycles count.
            stop = following[place]
            if stop != place:
                stop = min(stop, jump)
                execution.cycles += stop - place
                place = stop
                continue
            issue = issues[place]
            if issue is None:
                issue = issues[place] = self._create_issue(self.bundles[place])
            execution.cycles += 1
            chosen = issue()
            place += 1
            # A branch within the delay slots of another has no effect.
            if chosen >= 0 and jump > end:
                jump, target = place + self.model.delay_slots, chosen
        if begun < end:
            changes[begun] += 1
            changes[place] -= 1
        execution.counts = list(accumulate(changes[:end]))
        return execution

    def _find_following(self) -> list[int]:
        """Return, for each bundle, the first one from there on that changes the scalar state."""
        end = len(self.bundles)
        following = [end] * (end + 1)
        for place in range(end - 1, -1, -1):
            following[place] = place if self.bundles[place].steps else following[place + 1]
        return following

    def _create_issue(self, bundle: Bundle) -> Callable[[], int]:
        """Create the function that executes a bundle; it returns the branch target, or -1.

        All is read before anything is written.
        """
        steps: list[Read] = []
        written: list[tuple[str, int]] = []
        branches: list[int] = []
        for step in bundle.steps:
            if step.root == "sbr":
                branches.append(len(steps))
                steps.append(self._create_branch(step))
            elif step.root == "dma":
                steps.append(self._create_move(step))
            elif step.root == "sst":
                steps.append(read_store(step, self.state))
            elif step.result and step.root not in ("sphi", "pphi"):
                written.append((get_register(step.result), len(steps)))
                steps.append(read_result(step, self.state))
        return _join(steps, written, branches, self.state.registers)

    def _create_branch(self, step: ScalarStep) -> Read:
        """Create a branch, which returns its target, or -1."""
        guard, execution = read_value(step.guard or "1", self.state), self.execution

        def branch() -> int:
            decided = guard()
            execution.unknown += decided is None
            return step.target if decided else -1

        return branch

    def _create_move(self, step: ScalarStep) -> Read:
        """Create a step that issues a transfer, or waits for some."""
        guard, execution, state = (
            read_value(step.guard or "1", self.state),
            self.execution,
            self.state,
        )
        if step.opcode.startswith("dma.done"):
            flag, granules = (read_value(operand, state) for operand in step.operands[:2])
            act: Callable[[], None] = lambda: self._wait(flag(), granules())  # noqa: E731
        else:
            act = self._create_transfer(step)

        def move() -> None:
            decided = guard()
            execution.unknown += decided is None
            if decided:
                act()

        return move

    def _create_transfer(self, step: ScalarStep) -> Callable[[], None]:
        if step.opcode == "dma":
            return lambda: self._transfer(*self._read_descriptor(step.operands[0]))
        size, flag = (
            read_value(step.named.get(name, ""), self.state)
            for name in ("size_in_granules", "dst_syncflagno")
        )
        return lambda: self._transfer(size(), flag(), self._is_of_hbm(step))

    def _transfer(self, size: int | None, flag: int | None, is_of_hbm: bool) -> None:
        """Issue a transfer of granules, which signal a flag on arrival; on-chip ones are free."""
        if size is None:
            self.execution.unknown += 1
        elif is_of_hbm:
            self.execution.hbm_bytes += size * self.model.granule_bytes
            self.execution.transfers += 1
            self.flags[flag].append(self.memory.issue(self.execution.cycles, size))

    def _read_descriptor(self, text: str) -> tuple[int | None, int | None, bool]:
        """Read a transfer from eight words of scalar memory, as v2 and v3 describe strided ones."""
        table = text.strip("[]")
        # Spaces in words 1 and 4, granules in 6, flag in 7. A space that is unknown counts as HBM.
        words = [self.state.stored.get(f"[[{table} + $0x{place}]]") for place in range(1, 8)]
        spaces, size, flag = (words[0], words[3]), words[5], words[6]
        return (
            None if size is None else size & _SIZE,
            None if flag is None else flag & _MASK & ~_FLAG_MARK,
            any(space is None or space & _IN_HBM for space in spaces),
        )

    def _is_of_hbm(self, step: ScalarStep) -> bool:
        """Return whether one side is HBM; of a general transfer the pointers decide."""
        if step.opcode != "dma.general":
            return "hbm" in step.opcode
        # A side that is unknown counts as HBM, as above.
        sides = [step.named.get(name, "") for name in ("src", "dst")]
        known = [self.state.spaces.get(get_register(side.strip("%"))) for side in sides]
        return "hbm" in known or None in known

    def _wait(self, flag: int | None, granules: int | None) -> None:
        """Wait until that many granules of a flag have arrived; None: all that are under way."""
        waiting, come = self.flags[flag], 0
        while waiting and (granules is None or come < granules):
            transfer = waiting.popleft()
            come += transfer.granules
            # Transfers that are issued later cannot delay this one: the core waits here.
            late = self.memory.finish(transfer) - self.execution.cycles
            if late > 0:
                self.execution.waited += late
                self.execution.cycles += late


def _join(
    steps: list[Read],
    written: list[tuple[str, int]],
    branches: list[int],
    registers: dict[str, int | None],
) -> Callable[[], int]:
    """Join a bundle's steps into one function: results are written when all steps have read."""
    names = [name for name, _ in written]
    if 0 < len(names) == len(steps) <= 2:
        return _join_writes(steps, names, registers)

    def issue() -> int:
        values = [step() for step in steps]
        for name, place in written:
            registers[name] = values[place]
        target = -1
        for place in branches:
            chosen = values[place]
            if chosen is not None and chosen >= 0:
                target = chosen
        return target

    return issue


def _join_writes(
    steps: list[Read], names: list[str], registers: dict[str, int | None]
) -> Callable[[], int]:
    """Join one or two steps that write registers, as most bundles have."""
    (first, *rest), (name, *other_names) = steps, names

    def issue_alone() -> int:
        registers[name] = first()
        return -1

    if not rest:
        return issue_alone
    (second,), (other,) = rest, other_names

    def issue_both() -> int:
        registers[name], registers[other] = first(), second()
        return -1

    return issue_both
