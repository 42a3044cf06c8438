"""Imports between the top-level packages."""

from __future__ import annotations

import ast
from pathlib import Path

from tests.test_floors import (
    OLD_NAMES,
    OWN,
    ROOT,
    _is_for_types,
    _iterate_imports,
    _iterate_inside,
    list_sources,
)


def draw_house(root: Path) -> dict[str, set[str]]:
    """Rooms at the top level and the rooms that each imports, types and deferred ones left out."""
    arrows: dict[str, set[str]] = {}
    for path in list_sources(root):
        name = path.relative_to(root).as_posix()
        top = name.partition("/")[0].removesuffix(".py")
        if top == "tests" or name in OLD_NAMES:
            continue
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        typed = {id(n) for n in _iterate_inside(filter(_is_for_types, nodes))}
        module = name.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        found = arrows.setdefault(top, set())
        for node, target in _iterate_imports(module, name, nodes):
            other = target.partition(".")[0]
            if other in OWN and other != top and id(node) not in typed:
                found.add(other)
    return arrows


def find_circle(arrows: dict[str, set[str]], between: set[str]) -> set[str]:
    """Return the rooms on or behind a circle of imports; empty without one."""
    open_rooms = {room: targets & between for room, targets in arrows.items() if room in between}
    while leaves := [room for room, targets in open_rooms.items() if not targets]:
        for leaf in leaves:
            del open_rooms[leaf]
        open_rooms = {room: targets - set(leaves) for room, targets in open_rooms.items()}
    return set(open_rooms)


def test_packages_are_small_and_have_no_import_cycle():
    """`utils` is four rooms of different floors behind one name, so it stands apart."""
    arrows = draw_house(ROOT)
    assert len(arrows) <= 18  # the last one is the wheel's face, `tpudistil.py`
    assert sum(map(len, arrows.values())) <= 72
    assert find_circle(arrows, set(arrows) - {"utils"}) == set()


def test_a_planted_import_cycle_is_found():
    arrows = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}, "e": set()}
    assert find_circle(arrows, set(arrows)) >= {"a", "b", "c"}
    assert find_circle({"a": {"b"}, "b": set()}, {"a", "b"}) == set()
