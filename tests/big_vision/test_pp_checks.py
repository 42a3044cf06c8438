"""Strings are fully checked without TensorFlow, and faults give one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from big_vision.pp.builder import get_preprocess_fn
from big_vision.pp.checks import check_spec, describe_error, require_valid_spec
from big_vision.pp.registry import OPS
from utils.errors import UserError

ROOT = Path(__file__).resolve().parents[2]

# The string, the class of its error, the character at which it lies, words of the line.
FAULTS = [
    ("decode|flip_rl|value_range", KeyError, 8, "did you mean 'flip_lr'?"),
    ("decode||resize()", TypeError, 9, "missing 1 required positional argument: 'size'"),
    ("decode|resize(4, bogus=1)", TypeError, 8, "resize(size, method='bilinear'"),
    ("flip_lr(1)", TypeError, 1, "its form is flip_lr()"),
    ("decode|keep('image'", ValueError, 12, "broken syntax"),
    ("decode|keep('a|b')", ValueError, 13, "also inside quotes"),
    ("decode|keep(image)", ValueError, 8, "is not an op"),
    ("decode|resize(1+1)", ValueError, 8, "is not an op"),
    ("decode| flip_lr", KeyError, 8, "blank"),
    ("decode |flip_lr", KeyError, 1, "blank"),
    ("decode| resize(4)", ValueError, 8, "blank"),
    ("decode|resize(8, 'cubic')", ValueError, 8, "method='cubic' is not one of bilinear"),
    ("pad_to_shape((4, 4), where='middle')", ValueError, 1, "before, after or both"),
    ("value_range('a', 1)", ValueError, 1, "vmin='a' is not a number"),
    ("vgg_value_range((0, 0, 0), (1, 0, 1))", ValueError, 1, "std=(1, 0, 1)"),
    ("decode|random_crop(-1)", ValueError, 8, "crop_size=-1"),
    ("randaug(2, '9')", ValueError, 1, "magnitude='9'"),
    ("choice(n='all')", ValueError, 1, "n='all'"),
    ("decode|value_range(1, 1)", ValueError, 8, "vmin and vmax are both 1"),
    ("value_range(0, 1, 7, 7)", ValueError, 1, "in_min=7 and in_max=7"),
    ("value_range(0, 1, 0, [255, 0, 255])", ValueError, 1, "in_max=[255, 0, 255] leave no"),
    ("value_range(0, 1, [0, 0], [9, 9, 9])", ValueError, 1, "2 numbers and in_max 3"),
    ("value_range(-1, 1e999)", ValueError, 1, "vmax=inf is not a number"),
    ("random_resized_crop(0)", ValueError, 1, "size=0 is not a positive side"),
    ("random_resized_crop(8, (0.5, 0.1))", ValueError, 1, "scale=(0.5, 0.1) is not two shares"),
    ("random_resized_crop(8, (0, 1))", ValueError, 1, "scale=(0, 1) is not two shares"),
    ("random_resized_crop(8, (0.1, 2))", ValueError, 1, "scale=(0.1, 2) is not two shares"),
    ("random_resized_crop(8, ratio=1)", ValueError, 1, "ratio=1 is not two numbers above 0"),
    ("random_resized_crop(8, method='any')", ValueError, 1, "is not one of random, bilinear"),
    ("decode|resize(8, 'random')", ValueError, 8, "method='random' is not one of bilinear"),
    ("decode|center_crop_pct(8, 1.1)", ValueError, 8, "pct=1.1 is not a number above 0, at most 1"),
    ("decode|center_crop_pct(8, mode='border')", ValueError, 8, "is not one of center, squash"),
    ("lookup('/nowhere/words.txt')", FileNotFoundError, 1, "/nowhere/words.txt"),
]


@pytest.mark.parametrize(("spec", "error", "character", "words"), FAULTS)
def test_a_fault_gives_one_line_with_key_and_position(spec, error, character, words):
    with pytest.raises(error) as caught:
        check_spec(spec)
    line = describe_error(spec, caught.value)
    assert f"at character {character}" in line
    assert words in line
    assert "\n" not in line
    with pytest.raises(UserError, match=r"^data\.train_pp: "):
        require_valid_spec(spec, "data.train_pp")


def test_an_error_of_a_call_gives_one_line_too():
    assert describe_error("decode", RuntimeError("two\nlines")) == "RuntimeError: two lines"


@pytest.mark.parametrize(
    "spec",
    [
        None,
        "",
        "||decode||",
        "decode_jpeg_and_inception_crop(224)|flip_lr|value_range(-1, 1)",
        "decode|resize_small(256)|central_crop(224)|value_range(-1, 1)",
        "decode(channels=1)|resize([20, 30], antialias=True)|random_crop((8, 9))|vgg_value_range()",
        "choice(n=[2, 4], key='t')|choice_no_replacement(key='u')|setdefault('x', 1)",
        "value_range(1, -1, [0, 10], 255)",
        "decode|randaug(2, 10)|autoaugment|three_augment|color_jitter(0.4, 0.4, 0.4, 0.1)",
    ],
)
def test_a_valid_string_passes(spec):
    check_spec(spec)
    require_valid_spec(spec, "data.train_pp")
    # Up to its last character: a fault behind it is found, and found where it is.
    character = len(spec or "") + 2
    with pytest.raises(UserError, match=f"unknown op 'nope' at character {character};"):
        require_valid_spec(f"{spec or ''}|nope", "data.train_pp")


def test_strings_are_checked_and_split_without_tensorflow():
    code = (
        "import sys; sys.modules['tensorflow'] = None\n"
        "from big_vision.pp.checks import check_spec\n"
        "from big_vision.pp.device_ops import split_device_ops\n"
        "from big_vision.pp.registry import OPS\n"
        "spec = 'decode_jpeg_and_inception_crop(224)|flip_lr|randaug(2, 9)|value_range(-1, 1)'\n"
        "check_spec(spec)\n"
        "assert split_device_ops(spec)[1].mean == (127.5,)\n"
        "assert len(OPS.names()) >= 32\n"
    )
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


@pytest.mark.parametrize("op", OPS.names())
def test_the_documentation_has_every_op(op):
    assert f"`{op}" in (ROOT / "docs" / "preprocessing.md").read_text()


def test_every_example_string_of_the_documentation_is_valid():
    text = (ROOT / "docs" / "preprocessing.md").read_text()
    blocks = [block.split("```")[0] for block in text.split("```pp\n")[1:]]
    specs = [line for block in blocks for line in block.splitlines() if line]
    assert len(specs) >= 4
    for spec in specs:
        check_spec(spec)


def test_building_raises_the_published_classes():
    with pytest.raises(KeyError, match=r"preprocess_ops\.nope"):
        get_preprocess_fn("nope(1)")
    with pytest.raises(ValueError, match=r"Syntax error on: decode\("):
        get_preprocess_fn("decode(")
    with pytest.raises(TypeError, match="size"):
        get_preprocess_fn("resize")


@pytest.mark.parametrize(
    ("spec", "is_right"),
    [
        ("inception_crop(None)", True),
        ("inception_crop(0)", True),
        ("inception_crop(-1)", False),
        ("inception_crop(8, area_min=100, area_max=100)", True),
        ("inception_crop(8, area_min=0, area_max=0.5)", True),
        ("inception_crop(8, area_min=101)", False),
        ("inception_crop(8, area_max=0)", False),
        ("choice('single', key='a')", True),
        ("choice([1, 2], key='a')", True),
        ("choice('twice', key='a')", False),
    ],
)
def test_bounds_of_arguments_are_checked(spec, is_right):
    if is_right:
        check_spec(spec)
    else:
        with pytest.raises(ValueError, match="is not"):
            check_spec(spec)
