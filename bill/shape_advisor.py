"""Where a model's sizes waste a TPU's matrix unit, and which near sizes would be cheaper.

Lists the matrix products of a model, compiles them and their neighbours in width, head or class
count for a TPU that need not be here, and prints what the compiler estimates for each.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import BaseModel

from bill import compiler
from bill.targets import Target, parse_target
from utils.errors import UserError
from utils.json_types import JsonObject, load_json
from utils.programs import CommandLine, create_defaults_parser, prepare_file, require_at_least
from utils.storage.json_files import write_json

if TYPE_CHECKING:
    from torch import Tensor, nn

# An operand's K and N are padded to the width of the matrix unit, rows to 8 only.
_ROWS = 8
_SHOWN = 12
# The axis of an attention's products that is as long as a head is wide.
_HEAD_AXES = {"scores": "K", "values": "N"}


@dataclass
class Product:
    """A matrix product [batch, M, K] x [batch, K, N] of a forward pass.

    Args:
      paths: modules that make it.
      fill: useful share of the multiplications that the padded sizes make.
      kcycles: the compiler's estimate, in thousands; None if not compiled.
      cheaper: sizes of K or N nearby that cost less for each unit of work: (axis, size, kcycles).
    """

    batch: int
    rows: int
    inner: int
    columns: int
    paths: list[str] = field(default_factory=list)
    fill: float = 1.0
    kcycles: float | None = None
    neighbours: list[tuple[str, int, float]] = field(default_factory=list)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """[batch, M, K, N]."""
        return self.batch, self.rows, self.inner, self.columns

    @property
    def work(self) -> float:
        """Useful multiplications of all its uses."""
        return float(math.prod(self.sizes) * len(self.paths))


class ProductsAnswer(BaseModel):
    """Answer of `children/matmul_child.py`."""

    cycles: list[int]  # of each product, in the request's order


def create_parser() -> argparse.ArgumentParser:
    """Create the command line."""
    parser = create_defaults_parser(__doc__, prog="python -m tools.shape_advisor")
    add = parser.add_argument
    add("--model", default="vit_small_patch16_224", help="timm or own model name")
    add("--args", default="{}", metavar="JSON", help="its arguments, an object of JSON")
    add("--target", default="v5e:2x2", help="generation and slice, such as v6e:2x2")
    add("--batch", type=int, default=64, help="images on each device")
    add("--image-size", type=int, default=224, help="side of an image")
    add("--num-classes", type=int, default=1000, help="classes of the head")
    add("--time-limit", type=float, default=600.0, help="seconds that the compiler may take")
    add(
        "--law",
        type=Path,
        metavar="FILE.json",
        help="what sizes are padded to, as "
        "lab.matmul --json has found (default: the matrix unit's width, 8 rows)",
    )
    add("--json", type=Path, help="write the table here")
    return parser


def run(options: argparse.Namespace) -> int:
    """List, compile and print."""
    require_at_least(1, options, "time_limit", "batch", "image_size", "num_classes")
    arguments = {**read_arguments(options.args), "num_classes": options.num_classes}
    target = parse_target(options.target)
    law = read_law(options.law) if options.law else None
    prepare_file(options.json, "--json")
    products = list_products(
        create_model(options.model, arguments), options.batch, options.image_size
    )
    width = target.generation.unit_width
    for product in products:
        product.fill = get_fill(product.sizes, width, law)
    versions = compiler.require_compiler()
    shown = sorted(products, key=lambda product: -product.work)[:_SHOWN]
    plan = plan_neighbours(shown, width)
    sizes = [list(key) for key in plan]
    sys.stderr.write(f"compiling {len(sizes)} products for {target.name}\n")
    script = Path(__file__).resolve().parent / "children" / "matmul_child.py"
    request = {"topology": target.topology, "products": sizes}
    answer = compiler.run_script(script, request, target, options.time_limit, ProductsAnswer)
    fill_in(shown, dict(zip(plan, answer.cycles, strict=True)), width)
    print_table(options, target, shown, law)
    if options.json:
        content = {
            "target": target.name,
            "versions": versions,
            "products": [{**asdict(product), "work": product.work} for product in shown],
        }
        write_json(options.json, content)
    return 0


def read_arguments(text: str) -> JsonObject:
    """Read the arguments of a model.

    Raises:
      UserError: they are no object of JSON, or hold what a flag of its own says.
    """
    way_out = """give an object such as '{"depth": 6}'"""
    try:
        arguments = load_json(text)
    except ValueError as error:
        raise UserError(f"--args ({text!r}) is no JSON: {error}; {way_out}") from error
    if not isinstance(arguments, dict):
        raise UserError(f"--args ({text!r}) is JSON, but no object; {way_out}")
    if "num_classes" in arguments:
        raise UserError(f"--args ({text!r}) must leave num_classes to --num-classes; move it there")
    return arguments


def create_model(name: str, arguments: JsonObject) -> nn.Module:
    """Create a model on meta.

    Raises:
      UserError: there is no model of that name, or with these arguments.
    """
    from models.factory import build_model

    try:
        return build_model(name, arguments, device="meta")
    except UserError:
        raise
    except (ArithmeticError, LookupError, RuntimeError, ValueError) as error:
        raise UserError(
            f"--args: {name} cannot be built with {json.dumps(arguments)}: {error}; change them"
        ) from error


def list_products(model: nn.Module, batch: int, side: int) -> list[Product]:
    """List the matrix products of a forward pass, equal ones together; the model is on meta."""
    import torch
    from timm.layers import Attention
    from torch import nn

    products: dict[tuple[int, int, int, int], Product] = {}

    def add(path: str, *sizes: *tuple[int, int, int, int]) -> None:
        products.setdefault(sizes, Product(*sizes)).paths.append(path)

    def watch(path: str, module: nn.Module) -> None:
        def see(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            x = inputs[0]
            if isinstance(module, nn.Linear):
                rows = x.numel() // module.in_features
                add(path, 1, rows, module.in_features, module.out_features)
            elif isinstance(module, nn.Conv2d) and module.groups == 1:
                inner = module.weight[0].numel()
                add(path, 1, output.numel() // module.out_channels, inner, module.out_channels)
            elif isinstance(module, Attention):
                groups, tokens = x.shape[0] * module.num_heads, x.shape[1]
                add(f"{path} scores", groups, tokens, module.head_dim, tokens)
                add(f"{path} values", groups, tokens, tokens, module.head_dim)

        module.register_forward_hook(see)

    for path, module in model.named_modules():
        watch(path, module)
    channels = next(p.shape[1] for p in model.parameters() if p.dim() == 4)
    try:
        with torch.no_grad():
            model.eval()(torch.empty((batch, channels, side, side), device="meta"))
    except (AssertionError, RuntimeError) as error:
        raise UserError(
            f"--image-size ({side}) does not suit the model: {error}; give the size it is built for"
        ) from error
    return list(products.values())


def get_fill(sizes: Sequence[int], width: int, law: dict[str, int] | None = None) -> float:
    """Useful share of a padded product: K and N to the unit's width, M to 8 rows, or by a law."""
    _, rows, inner, columns = sizes
    steps = law or {"M": _ROWS, "K": width, "N": width}
    padded = _round(rows, steps["M"]) * _round(inner, steps["K"]) * _round(columns, steps["N"])
    return rows * inner * columns / padded


def read_law(path: Path) -> dict[str, int]:
    """Read to what M, K and N are padded, from a report of `lab.matmul`.

    Raises:
      UserError: it is not such a report.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))["law"]
        law = {axis: int(record[axis]) for axis in ("M", "K", "N")}
        if min(law.values()) < 1:
            raise ValueError("a size is padded to 1 or more")
    except (OSError, ValueError, TypeError, KeyError, OverflowError) as error:
        raise UserError(
            f"--law ({str(path)!r}) holds no law of M, K and N ({error}); give a file of "
            "lab.matmul --json with all axes"
        ) from error
    return law


def _round(size: int, unit: int) -> int:
    return -(-size // unit) * unit


def plan_neighbours(products: Sequence[Product], width: int) -> list[tuple[int, int, int, int]]:
    """List what to compile: each product, and with K or N a full number of widths, up and down."""
    plan: dict[tuple[int, int, int, int], None] = {}
    for product in products:
        plan[product.sizes] = None
        for _, sizes in list_neighbours(product, width):
            plan[sizes] = None
    return list(plan)


def list_neighbours(product: Product, width: int) -> list[tuple[str, tuple[int, int, int, int]]]:
    """Sizes that fill the unit, with the axis that was changed; empty if it is full already."""
    batch, rows, inner, columns = product.sizes
    neighbours = []
    for axis, size in (("K", inner), ("N", columns)):
        up = _round(size, width)
        for other in (up - width, up):
            if other > 0 and other != size and size % width:
                changed = (other, columns) if axis == "K" else (inner, other)
                neighbours.append((axis, (batch, rows, *changed)))
    return neighbours


def fill_in(
    products: Sequence[Product], cycles: dict[tuple[int, int, int, int], int], width: int
) -> None:
    """Estimates of products and of their neighbours."""
    for product in products:
        product.kcycles = cycles[product.sizes] / 1e3
        product.neighbours = [
            (axis, sizes[2] if axis == "K" else sizes[3], cycles[sizes] / 1e3)
            for axis, sizes in list_neighbours(product, width)
        ]


def describe_neighbour(product: Product, axis: str, size: int, kcycles: float) -> str:
    """`N=1024: 1.00x the cost, 1.02x the size`, with a mark where size is cheaper than cost."""
    own = product.inner if axis == "K" else product.columns
    assert product.kcycles is not None  # `fill_in` was called
    cost, change = kcycles / product.kcycles, size / own
    mark = "*" if cost < change * 0.98 else " "
    return f"{mark} {axis}={size}: {cost:.2f}x the cost, {change:.2f}x the size"


def name_axis(product: Product, axis: str, num_classes: int) -> str:
    """Name the part of the model that a product's K or N is."""
    kind = product.paths[0].rpartition(" ")[2]
    if kind in _HEAD_AXES:
        return "head width" if axis == _HEAD_AXES[kind] else "tokens"
    return "classes" if axis == "N" and product.columns == num_classes else "width"


def describe_padding(options: argparse.Namespace, width: int, law: dict[str, int] | None) -> str:
    """Describe what the filled share follows from."""
    if law is None:
        return f"K and N are padded to {width}, M to {_ROWS}"
    steps = ", ".join(f"{axis} to {step}" for axis, step in law.items())
    return f"by {options.law}, sizes are padded: {steps}; neighbours are multiples of {width}"


def print_table(
    options: argparse.Namespace,
    target: Target,
    products: Sequence[Product],
    law: dict[str, int] | None = None,
) -> None:
    """Products by work, with their neighbours."""
    width = target.generation.unit_width
    print(
        f"{options.model} on {target.name}, {options.batch} images of {options.image_size} pixels: "
        f"the {len(products)} largest products of a forward pass"
    )
    print(
        f"{describe_padding(options, width, law)}; kcycles are the compiler's estimate, not a "
        "measurement; * marks sizes that cost less for what they hold"
    )
    print(f"{'uses':>4} {'batch x M x K x N':<28}{'filled':>7}{'kcycles':>10}  first use")
    for product in products:
        sizes = " x ".join(map(str, product.sizes))
        print(
            f"{len(product.paths):>4} {sizes:<28}{100 * product.fill:>6.0f}%"
            f"{product.kcycles:>10.1f}  {product.paths[0]}"
        )
        for neighbour in product.neighbours:
            meaning = name_axis(product, neighbour[0], options.num_classes)
            print(f"       {describe_neighbour(product, *neighbour)}, {meaning}")


main = CommandLine(create_parser, run)

if __name__ == "__main__":
    sys.exit(main())
