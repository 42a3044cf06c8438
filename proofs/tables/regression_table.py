"""The table of docs/regression.md: test r2 of this project's models beside scikit-learn's.

    python -m proofs.tables.regression_table
    python -m proofs.tables.regression_table --seeds 2 --tables diabetes

For each seed the rows are split anew (`data.split_seed`), and every model learns from the same
training rows and is judged on the same test rows. Ours are runs of main.py by the configurations
below configs/regression/, with that seed; scikit-learn's models have their defaults, the network
2,000 iterations and standardised columns. Nobody looks at the test rows but once, at the end.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import main as program
from datasets import create_source
from proofs.tables.table_runs import require_distinct
from utils.config.load import load_config
from utils.errors import UserError
from utils.programs import create_program_parser, require_at_least, run_program

if TYPE_CHECKING:
    from utils.config.load import RunConfig

ROOT = Path(__file__).resolve().parents[2]
# Table -> our models by the names of their configurations.
TABLES = {
    "diabetes": {"linear": "diabetes_linear", "mlp": "diabetes_mlp"},
    "linnerud": {"linear": "linnerud_linear", "mlp": "linnerud_mlp"},
    "friedman1": {"linear": "friedman1_linear", "mlp": "friedman1_teacher"},
}
_THEIRS = ("LinearRegression", "MLPRegressor", "HistGradientBoostingRegressor")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the program; the exit code."""
    options = create_parser().parse_args(argv)
    return run_program(lambda: write_table(options))


def create_parser() -> argparse.ArgumentParser:
    """The command line."""
    parser = create_program_parser(__doc__, prog="python -m proofs.tables.regression_table")
    parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from 0 (5)")
    parser.add_argument("--tables", nargs="+", default=list(TABLES), choices=list(TABLES),
                        help="which of them (all)")  # fmt: skip
    return parser


def write_table(options: argparse.Namespace) -> None:
    """Print the table row by row, as it is measured."""
    require_distinct(options, "tables")
    require_at_least(1, options, "seeds")
    print("| rows | model | test r2 of each seed | mean | standard deviation |")
    print("|---|---|---|---:|---:|")
    with tempfile.TemporaryDirectory() as folder:
        for table in options.tables:
            for model, judge in list_models(table, Path(folder)):
                values = [judge(seed) for seed in range(options.seeds)]
                print(format_row(table, model, values), flush=True)


def list_models(table: str, folder: Path) -> list[tuple[str, Callable[[int], float]]]:
    """Names of models and what gives the test r2 of one at a seed."""
    ours = [
        (f"`{model}` (`{name}.yaml`)", lambda seed, name=name: run_ours(name, seed, folder))
        for model, name in TABLES[table].items()
    ]
    first = next(iter(TABLES[table].values()))
    theirs = [
        (f"scikit-learn's {kind}", lambda seed, kind=kind: fit_theirs(kind, first, seed))
        for kind in _THEIRS
    ]
    return [*ours, *theirs]


def format_row(table: str, model: str, values: Sequence[float]) -> str:
    """A row of the table."""
    shown = " / ".join(f"{value:.3f}" for value in values)
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"| {table} | {model} | {shown} | {statistics.mean(values):.3f} | {spread:.3f} |"


def get_flags(name: str, seed: int) -> list[str]:
    """A configuration's flags at a seed."""
    config = ROOT / "configs" / "regression" / f"{name}.yaml"
    return ["--config", str(config), f"--data.split_seed={seed}", f"--train.seed={seed}"]


def run_ours(name: str, seed: int, folder: Path) -> float:
    """Test r2 of a run of main.py."""
    flags = [
        *get_flags(name, seed), f"--run.output_dir={folder}", "--run.experiment=table",
        f"--run.run_id={name}_{seed}", "--runtime.device=cpu", "--run.tensorboard=false",
    ]  # fmt: skip
    if program.main(flags):
        raise UserError(f"{name} failed at seed {seed}; the log above says why")
    facts = json.loads((folder / "table" / f"{name}_{seed}" / "run.json").read_text())
    return facts["final"]["test_r2"]


def fit_theirs(kind: str, name: str, seed: int) -> float:
    """Test r2 of one of scikit-learn's models on the rows of a configuration at a seed.

    Args:
      name: of the configuration, which says what the splits are.
    """
    from sklearn.metrics import r2_score

    config = load_config(get_flags(name, seed))
    (xs, ys), (test_xs, test_ys) = (read_rows(config, role) for role in ("train", "test"))
    model = create_theirs(kind, seed).fit(xs, ys)
    return float(r2_score(test_ys, model.predict(test_xs)))


def read_rows(config: RunConfig, role: str) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets of a run's split."""
    rows = create_source(config.data).select(role).rows
    return rows.inputs, rows.targets


def create_theirs(kind: str, seed: int) -> object:
    """A model of scikit-learn, its columns and targets standardised where it is a network."""
    from sklearn.compose import TransformedTargetRegressor
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.linear_model import LinearRegression
    from sklearn.multioutput import MultiOutputRegressor
    from sklearn.neural_network import MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if kind == "LinearRegression":
        return LinearRegression()
    if kind == "HistGradientBoostingRegressor":
        return MultiOutputRegressor(HistGradientBoostingRegressor(random_state=seed))
    network = make_pipeline(StandardScaler(), MLPRegressor(max_iter=2000, random_state=seed))
    return TransformedTargetRegressor(network, transformer=StandardScaler())


if __name__ == "__main__":
    sys.exit(main())
