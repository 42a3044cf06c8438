"""The advisor on sizes: which products a model makes, what fills the unit, what is tried."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import timm
import torch

from bill import compiler
from bill import shape_advisor as tool
from bill.shape_advisor import Product

HAS_COMPILER = all(importlib.util.find_spec(name) for name in ("jax", "libtpu"))
VIT = {"embed_dim": 96, "depth": 2, "num_heads": 3, "img_size": 32, "patch_size": 8}


def create_products() -> dict[tuple[int, ...], Product]:
    with torch.device("meta"):
        model = timm.create_model("vit_tiny_patch16_224", num_classes=10, **VIT)
    return {one.sizes: one for one in tool.list_products(model, batch=4, side=32)}


def test_the_products_of_a_vit_follow_its_definition():
    tokens, width, heads, depth = 17, 96, 3, 2
    rows = 4 * tokens
    wanted = {
        (1, 4 * 16, 3 * 64, width): 1,
        (1, rows, width, 3 * width): depth,
        (4 * heads, tokens, width // heads, tokens): depth,
        (4 * heads, tokens, tokens, width // heads): depth,
        (1, rows, width, width): depth,
        (1, rows, width, 4 * width): depth,
        (1, rows, 4 * width, width): depth,
        (1, 4, width, 10): 1,
    }
    assert {sizes: len(one.paths) for sizes, one in create_products().items()} == wanted


def test_convolutions_are_products_of_their_windows():
    with torch.device("meta"):
        model = timm.create_model("resnet18", num_classes=10)
    sizes = {one.sizes for one in tool.list_products(model, batch=2, side=64)}
    assert (1, 2 * 32 * 32, 3 * 7 * 7, 64) in sizes
    assert (1, 2 * 16 * 16, 64 * 3 * 3, 64) in sizes


@pytest.mark.parametrize(
    ("sizes", "width", "fill"),
    [
        ((1, 8, 128, 128), 128, 1.0),
        ((1, 8, 64, 128), 128, 0.5),
        ((1, 4, 128, 128), 128, 0.5),
        ((1, 8, 384, 256), 256, 0.75),
        ((7, 8, 129, 128), 128, 129 / 256),
    ],
)
def test_the_filled_share_is_relative_to_padded_sizes(sizes, width, fill):
    assert tool.get_fill(sizes, width) == pytest.approx(fill)


def test_neighbours_are_the_full_widths_around_a_size():
    product = Product(1, 64, 384, 1000)
    found = [(axis, sizes[2:]) for axis, sizes in tool.list_neighbours(product, 256)]
    assert found == [("K", (256, 1000)), ("K", (512, 1000)), ("N", (384, 768)), ("N", (384, 1024))]
    assert tool.list_neighbours(Product(1, 64, 256, 512), 256) == []
    small = tool.list_neighbours(Product(1, 64, 64, 128), 128)
    assert [sizes for _, sizes in small] == [(1, 64, 128, 128)]


def test_a_larger_size_at_the_same_cost_is_marked():
    product = Product(1, 64, 384, 1000, ["head"], kcycles=5.0)
    assert tool.describe_neighbour(product, "N", 1024, 5.0).startswith("* N=1024: 1.00x the cost")
    assert tool.describe_neighbour(product, "N", 768, 5.0).startswith("  N=768")


@pytest.mark.parametrize(
    ("path", "axis", "meaning"),
    [
        ("blocks.0.attn scores", "K", "head width"),
        ("blocks.0.attn scores", "N", "tokens"),
        ("blocks.0.attn values", "K", "tokens"),
        ("blocks.0.attn values", "N", "head width"),
        ("head", "N", "classes"),
        ("head", "K", "width"),
    ],
)
def test_an_axis_is_named_in_the_models_words(path, axis, meaning):
    assert tool.name_axis(Product(1, 64, 384, 10, [path]), axis, num_classes=10) == meaning


CHILD = """
import json, pathlib, sys
path = pathlib.Path(sys.argv[1])
products = json.loads(path.read_text())["products"]
cycles = [1000 * batch * rows for batch, rows, inner, columns in products]
(path.parent / "facts.json").write_text(json.dumps({"cycles": cycles}))
"""


def test_the_table_holds_the_compilers_figures(tmp_path, monkeypatch, capsys):
    (tmp_path / "children").mkdir()
    (tmp_path / "children" / "matmul_child.py").write_text(CHILD)
    monkeypatch.setattr(tool, "__file__", str(tmp_path / "shape_advisor.py"))
    monkeypatch.setattr(compiler, "require_compiler", lambda *_: {"libtpu": "0"})
    target = tmp_path / "table.json"
    flags = [
        "--args",
        json.dumps(VIT),
        "--model",
        "vit_tiny_patch16_224",
        "--image-size",
        "32",
        "--batch",
        "4",
        "--num-classes",
        "10",
        "--json",
        str(target),
    ]
    assert tool.main(flags) == 0
    text = capsys.readouterr().out
    assert "K and N are padded to 128, M to 8; kcycles" in text and "not a measurement" in text
    assert "* N=128: 1.00x the cost, 1.33x the size" in text
    products = json.loads(target.read_text())["products"]
    assert products[0]["kcycles"] == products[0]["batch"] * products[0]["rows"]
    assert [one["work"] for one in products] == sorted((o["work"] for o in products), reverse=True)
    law = tmp_path / "law.json"
    law.write_text('{"law": {"M": 16, "K": 32, "N": 64}}')
    assert tool.main([*flags, "--law", str(law)]) == 0
    text = capsys.readouterr().out
    assert f"by {law}, sizes are padded: M to 16, K to 32, N to 64; neighbours are" in text
    assert "padded to 128" not in text


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--target", "v9"], "--target"),
        (["--model", "vit_smal"], "no model"),
        (["--image-size", "100"], "--image-size (100) does not suit"),
        (["--json", "/proc/nowhere/t.json"], "cannot be created"),
        (["--batch", "0"], "--batch (0) must be at least 1"),
        (["--image-size", "0"], "--image-size (0) must be at least 1"),
        (["--num-classes", "0"], "--num-classes (0) must be at least 1"),
        (["--args", "[1]"], "--args ('[1]') is JSON, but no object; give an object such as"),
        (["--args", "null"], "--args ('null') is JSON, but no object"),
        (["--args", "{"], "--args ('{') is no JSON: "),
        (["--args", "[" * 100_000], "is no JSON: it is nested too deep"),
        (["--args", '{"num_classes": 5}'], "must leave num_classes to --num-classes"),
        (
            ["--args", '{"depth": -1}'],
            '--args: vit_small_patch16_224 cannot be built with {"depth"',
        ),
        (["--args", '{"img_size": 0}'], "--args: vit_small_patch16_224 cannot be built with"),
    ],
    ids=lambda one: one[:40] if isinstance(one, str) else "",
)
def test_bad_input_gives_one_line(flags, word, capsys):
    assert tool.main(flags) == 2
    text = capsys.readouterr().err
    assert text.count("\n") == 1
    assert word in text


@pytest.mark.parametrize("step", ["0", "-8", "0.5", "1e999", "NaN", "null", '"x"'])
def test_a_padding_law_without_positive_steps_is_refused_in_one_line(step, tmp_path, capsys):
    path = tmp_path / "law.json"
    path.write_text(f'{{"law": {{"M": 8, "K": {step}, "N": 128}}}}')
    assert tool.main(["--law", str(path)]) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"error: --law ({str(path)!r}) holds no law") and text.count("\n") == 1


@pytest.mark.slow
@pytest.mark.skipif(not HAS_COMPILER, reason="needs jax and libtpu: setup --tpu-compiler")
def test_the_compiler_prefers_full_widths(tmp_path):
    script = Path(tool.__file__).parent / "children" / "matmul_child.py"
    products = [[1, 8192, 513, 4096], [1, 8192, 640, 4096]]
    request = {"topology": "v5e:2x2x1", "products": products}
    target = tool.parse_target("v5e:2x2")
    answer = compiler.run_script(script, request, target, 300.0, tool.ProductsAnswer)
    odd, full = answer.cycles
    assert full < odd
