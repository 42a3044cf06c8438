"""Class names of two sides: equal, permuted, different, or unknown on one side."""

from __future__ import annotations

import pytest
from timm.data import ImageNetInfo

from utils.errors import UserError
from utils.weights.class_names import (
    ClassSide,
    map_classes_by_name,
    match_class_names,
    require_same_classes,
    warn_if_one_sided,
)

IMAGENET = ImageNetInfo("imagenet-1k")
NUMBERS, WORDS = IMAGENET.label_names(), IMAGENET.label_descriptions()
AB, BA = ("a", "b"), ("b", "a")


def require(own, other) -> None:
    require_same_classes(
        ClassSide("data.name 'x'", own),
        ClassSide("run.resume 'y'", other),
        way="change the data",
        by_name="map them",
    )


@pytest.mark.parametrize(
    ("own", "other", "outcome", "numbers"),
    [
        (AB, AB, "equal", (0, 1)),
        (AB, BA, "permuted", (1, 0)),
        (AB, ("a", "c"), "other", (0, -1)),
        (AB, ("a", "b", "c"), "other", (0, 1)),
        (("a", "a"), AB, "other", (0, 0)),
        (AB, ("a", "a"), "other", (-1, -1)),
        (AB, None, "one_sided", ()),
        (None, AB, "one_sided", ()),
        (None, None, "unnamed", ()),
    ],
)
def test_class_names_compare_as_equal_permuted_different_or_unknown(own, other, outcome, numbers):
    match = match_class_names(own, other)
    assert (match.outcome, match.numbers) == (outcome, numbers)


def test_descriptions_and_wordnet_numbers_of_imagenet_name_the_same_classes():
    assert match_class_names(WORDS, NUMBERS).outcome == "equal"
    assert match_class_names(NUMBERS, WORDS).outcome == "equal"
    some = ("espresso", "tripod", "n11939491")
    for whole in (WORDS, NUMBERS):
        match = match_class_names(some, whole)
        assert [NUMBERS[number] for number in match.numbers] == ["n07920052", "n04485082", some[2]]
    assert match_class_names(("espresso", "tripod"), ("n07920052", "n04485082")).outcome == "equal"
    # Two classes are called crane: a bird and a machine.
    assert match_class_names(("crane",), WORDS).ambiguous == ("crane",)
    assert match_class_names(("n02012849",), WORDS).numbers == (NUMBERS.index("n02012849"),)


def test_different_names_are_refused_with_counts_and_the_first_difference():
    with pytest.raises(UserError) as error:
        require(("a", "b", "c"), ("a", "x", "y"))
    assert str(error.value) == (
        "run.resume 'y' has other classes than data.name 'x': 2 of its 3 names are unknown here, "
        "first 'x' (known here: 'a', 'b', 'c'); change the data"
    )
    with pytest.raises(UserError, match="1 of its 3 names are missing there, first 'c'"):
        require(("a", "b", "c"), AB)
    with pytest.raises(UserError, match="'a' is the name of several classes"):
        require(("a", "a"), ("a", "a", "a"))


def test_another_order_is_refused_with_the_first_class_and_the_mapping_key():
    with pytest.raises(UserError, match="in another order: class 0 is 'b' there and 'a' here; map"):
        require(AB, BA)
    require(AB, AB)
    require(None, None)


def test_one_side_without_names_warns_once(caplog):
    require(AB, None)
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("run.resume 'y' has no class names and data.name 'x' has")
    warn_if_one_sided(ClassSide("x", None), ClassSide("y", None))
    assert len(caplog.messages) == 1


def test_classes_are_mapped_by_name_to_supersets_only():
    student = ClassSide("the student", BA)
    assert map_classes_by_name(student, ClassSide("it", ("c", "a", "b")), "do") == (2, 1)
    with pytest.raises(UserError, match="1 of the 2 classes of the student are unknown to it"):
        map_classes_by_name(student, ClassSide("it", ("a", "c")), "do")
    with pytest.raises(UserError, match="names of several classes of it, first 'a'"):
        map_classes_by_name(student, ClassSide("it", ("a", "a", "b")), "do")
    with pytest.raises(UserError, match="it has no class names to map by; do"):
        map_classes_by_name(student, ClassSide("it", None), "do")
