"""Write docs/results.md from the section `source` of the recipes: published figures, differences.

    python -m proofs.tables.recipe_table

`tests/test_recipe_sources.py` compares each value with the run that the YAML builds, and the page
with what this program writes.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import yaml

from store.quality.goodput import ASSUMED_RESUME_S, Interruptions
from store.quality.list_prices import read_price_list
from utils.config.layers import merge_layers, read_layers
from utils.config.sections import SourceSection
from utils.json_types import JsonValue
from utils.programs import run_program

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
DOCUMENT = "docs/results.md"
FOLDERS = ("imagenet", "kd")
SINGLE = ("augreg_b32_cifar10.yaml",)
_HEAD = """\
# Recipes, their published figures, and what differs

Each file below `configs/imagenet/` and `configs/kd/` holds in its section `source` what its
publication states. A test builds the run and compares: keys of the configuration, learning rates,
decay, stochastic depth block by block, the law of the crops, and the view of evaluation. What
differs is listed here with its reason, and nothing else differs among what is stated. This page is
written by `python -m proofs.tables.recipe_table`.

The figures are the publications' own. None of these recipes was run here. Names are keys of the
configuration or properties of the built run ([recipes.md](recipes.md#recipes-as-data)).
"""
SHOWN = ("v5litepod-8", "v6e-8")
_CHIPS = 8
_COSTS = """
## What a published result costs here

Hours and USD on demand by `python -m tools.plan` ([plan.md](plan.md)), counted and not measured:
the estimate and its range of whole runs without preemptions, a start of 5 minutes, at list prices
read on {read}. Dispatch by the host is not in it, which is most of a step on images of 32 pixels,
nor are stored outputs and teachers that are trained first. The last column names what a run has
otherwise than the source; the reasons stand below.
"""
_COST_HEADER = """
| recipe | v5litepod-8, hours | USD | v6e-8, hours | USD | faithful |
|---|---:|---:|---:|---:|---|
"""
_EVERYWHERE = """\
## What holds for all of them

- Mixup and cutmix mix an example with its neighbour in the global batch; timm takes the mirrored
  place in a rank's batch, big_vision the place before. Batches are shuffled: pairs are as random.
- `mix_mode: batch` draws once for the global batch; timm draws once for each rank's batch.
- Incomplete last batches of an epoch are dropped, and a run is whole epochs of whole batches.
- Adam's and LAMB's moments and the weights are float32; matrix products are bfloat16 on a TPU.
"""


def main(argv: list[str] | None = None) -> int:
    """Write the page; gives the exit code."""
    program = "python -m proofs.tables.recipe_table"
    argparse.ArgumentParser(prog=program, description=__doc__.partition("\n")[0]).parse_args(argv)
    return run_program(write_page)


def write_page() -> None:
    published = {name: source for name, source in read_sources().items() if source.published}
    costs = [format_cost(name, source) for name, source in published.items()]
    (ROOT / DOCUMENT).write_text(format_page(costs), encoding="utf-8")


def read_sources() -> dict[str, SourceSection]:
    """Read the sources of all recipes by name."""
    return {
        path.relative_to(CONFIGS).with_suffix("").as_posix(): read_source(path)
        for path in list_recipes()
    }


def read_costs() -> list[str]:
    """Read the rows of the table of costs from the page, as it was last written."""
    text = (ROOT / DOCUMENT).read_text(encoding="utf-8")
    _, _, below = text.partition(_COST_HEADER)
    rows = itertools.takewhile(lambda line: line.startswith("|"), below.splitlines())
    return list(rows)


def format_cost(name: str, source: SourceSection) -> str:
    """Format what a recipe costs by the plan: hours and USD on demand, and what differs."""
    from bill.plan_feed import find_cpu_ms
    from bill.plan_load import measure_load
    from store.quality.list_prices import ON_DEMAND
    from store.quality.slices import Assumptions, list_slices, plan_slices
    from utils.config.load import load_config

    config = load_config(["--config", str(CONFIGS / f"{name}.yaml")])
    cpu_ms, _ = find_cpu_ms(config)
    assumptions = Assumptions(
        terms=(ON_DEMAND,),
        interruptions=Interruptions(resume_s=ASSUMED_RESUME_S),
        cpu_ms=cpu_ms,
    )
    slices = [item for item in list_slices(_CHIPS) if item.name in SHOWN]
    cells: list[str] = []
    for plan in plan_slices(measure_load(config, {}, {}), slices, assumptions):
        bill = next(iter(plan.bills), None)
        if bill is None:
            cells += [plan.refusal or "not counted", "-"]
            continue
        span = f"{bill.low_hours:.3g} to {bill.high_hours:.3g}"
        cells += [f"{bill.hours:.3g} ({span})", f"{bill.usd:,.0f}"]
    count = len(source.differs)
    faithful = f"but for {', '.join(source.differs)}" if count else "in all that is stated"
    return f"| [`{name}`](#{_anchor(name)}) | {' | '.join(cells)} | {faithful} |"


def list_recipes() -> list[Path]:
    """List the files that have a source, in the page's order."""
    paths = [path for folder in FOLDERS for path in sorted((CONFIGS / folder).glob("*.yaml"))]
    return [*paths, *(CONFIGS / name for name in SINGLE)]


def read_source(path: Path) -> SourceSection:
    """Read the section `source` of a file and of what it extends."""
    return SourceSection.model_validate(
        merge_layers(read_layers(str(path), None)).get("source", {})
    )


def format_page(costs: Sequence[str]) -> str:
    """Format the whole page; `costs` are the rows of `format_cost`."""
    sources = read_sources()
    published = {name: source for name, source in sources.items() if source.published}
    others = {name: source for name, source in sources.items() if not source.published}
    parts = [_HEAD, "## Published figures\n", *_format_table(published, "published, not run here")]
    parts += [_COSTS.format(read=read_price_list().read), _COST_HEADER.strip(), *costs]
    parts += ["\n## Without a published figure\n", *_format_table(others, "after")]
    parts += ["", _EVERYWHERE, "## What differs from the source\n"]
    for name, source in sources.items():
        parts += _format_differences(name, source)
    return "\n".join(parts).rstrip() + "\n"


def _format_table(sources: dict[str, SourceSection], title: str) -> Iterator[str]:
    yield f"| recipe | {title} | source | differs in |"
    yield "|---|---|---|---|"
    for name, source in sources.items():
        count = len(source.differs)
        differs = f"[{count} of {len(source.values)}](#{_anchor(name)})" if count else "nothing"
        figure = source.published or f"{len(source.values)} stated values"
        yield f"| `{name}` | {figure} | {_format_source(source)} | {differs} |"


def _format_source(source: SourceSection) -> str:
    """Format the publication, and a link to the repository at its commit with its files."""
    if not source.code:
        return source.paper
    repository, _, files = source.code.partition(": ")
    names = ", ".join(file.rpartition("/")[2] for file in files.split(", "))
    url = f"https://github.com/{repository}/tree/{source.commit}"
    return f"{source.paper}, [{repository}]({url}): {names}"


def _format_differences(name: str, source: SourceSection) -> Iterator[str]:
    if not source.differs:
        return
    yield f"### `{name}`\n"
    yield "| name | source | reason |"
    yield "|---|---|---|"
    for key, reason in source.differs.items():
        yield f"| `{key}` | {_format_value(source.values[key])} | {reason} |"
    yield ""


def _format_value(value: JsonValue) -> str:
    if isinstance(value, str):
        return value
    text = yaml.safe_dump(value, default_flow_style=True, width=float("inf"), sort_keys=False)
    return text.removesuffix("\n").removesuffix("...").removesuffix("\n")


def _anchor(name: str) -> str:
    return name.replace("/", "").lower()


if __name__ == "__main__":
    sys.exit(main())
