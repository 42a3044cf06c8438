"""Prints the table of docs/regression.md: test r2 of this project's models and scikit-learn's.

    python -m proofs.tables.regression_table
    python -m proofs.tables.regression_table --seeds 2 --tables diabetes

For each seed the rows are split anew (`data.split_seed`), and every model learns from the same
training rows and is evaluated on the same test rows. Ours are runs of main.py by the configurations
below configs/regression/, with that seed; scikit-learn's models have their defaults, the network
2,000 iterations and standardised columns. The test rows are used once, at the end.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from big_vision.input.rows.arrays import VectorSelection
from big_vision.input.source import Role
from datasets import create_source
from proofs.study import frame as study
from utils.config.load import RunConfig, load_config
from utils.programs import require_at_least

if TYPE_CHECKING:
    from sklearn.compose import TransformedTargetRegressor
    from sklearn.linear_model import LinearRegression
    from sklearn.multioutput import MultiOutputRegressor

ROOT = Path(__file__).resolve().parents[2]
# Table -> our models by the names of their configurations.
TABLES = {
    "diabetes": {"linear": "diabetes_linear", "mlp": "diabetes_mlp"},
    "linnerud": {"linear": "linnerud_linear", "mlp": "linnerud_mlp"},
    "friedman1": {"linear": "friedman1_linear", "mlp": "friedman1_teacher"},
}
_SKLEARN = ("LinearRegression", "MLPRegressor", "HistGradientBoostingRegressor")


class RegressionTable(study.StudyTable):
    """Test r2: a row for each of our models and scikit-learn's, printed as it is measured."""

    name = "regression_table"
    distinct = ("tables",)

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__(options)
        require_at_least(1, options, "seeds")

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=5, help="number of seeds, from 0 (5)")
        parser.add_argument(
            "--tables",
            nargs="+",
            default=list(TABLES),
            choices=list(TABLES),
            help="which of them (all)",
        )
        parser.set_defaults(docs=None)

    def write(self) -> None:
        seeds = range(self.options.seeds)
        print("| rows | model | test r2 of each seed | mean | standard deviation |")
        print("|---|---|---|---:|---:|")
        with tempfile.TemporaryDirectory() as folder:
            for table in self.options.tables:
                models = TABLES[table]
                for model, name in models.items():
                    values = [self.run_ours(name, seed, folder) for seed in seeds]
                    print(format_row(table, f"`{model}` (`{name}.yaml`)", values), flush=True)
                for model in _SKLEARN:
                    values = [fit_sklearn(model, next(iter(models.values())), s) for s in seeds]
                    print(format_row(table, f"scikit-learn's {model}", values), flush=True)

    def run_ours(self, name: str, seed: int, folder: str) -> float:
        """Return test r2 of a run of main.py."""
        config = load_config(
            [
                *get_flags(name, seed),
                f"--run.output_dir={folder}",
                "--run.experiment=table",
                f"--run.run_id={name}_{seed}",
                "--runtime.device=cpu",
                "--run.tensorboard=false",
                *self.options.rest,
            ]
        )
        return study.train(config).read()["final"]["test_r2"]


def format_row(table: str, model: str, values: list[float]) -> str:
    """Format a row of the table."""
    *scores, mean, spread = study.format_scores(values, 3)
    return f"| {table} | {model} | {' / '.join(scores)} | {mean} | {spread or '0.000'} |"


def get_flags(name: str, seed: int) -> list[str]:
    """Return a configuration's flags at a seed."""
    config = ROOT / "configs" / "regression" / f"{name}.yaml"
    return ["--config", str(config), f"--data.split_seed={seed}", f"--train.seed={seed}"]


def fit_sklearn(model: str, name: str, seed: int) -> float:
    """Return test r2 of a model of scikit-learn, on the splits of the named configuration."""
    from sklearn.metrics import r2_score

    config = load_config(get_flags(name, seed))
    xs, ys = read_rows(config, "train")
    test_xs, test_ys = read_rows(config, "test")
    return float(r2_score(test_ys, create_sklearn(model, seed).fit(xs, ys).predict(test_xs)))


def read_rows(config: RunConfig, role: Role) -> tuple[np.ndarray, np.ndarray]:
    """Read inputs and targets of a run's split."""
    selection = create_source(config.data).select(role)
    assert isinstance(selection, VectorSelection)
    return selection.rows.inputs, selection.rows.targets


def create_sklearn(
    model: str, seed: int
) -> LinearRegression | MultiOutputRegressor | TransformedTargetRegressor:
    """Create a model of scikit-learn; columns and targets of a network are standardised."""
    from sklearn.compose import TransformedTargetRegressor
    from sklearn.ensemble import HistGradientBoostingRegressor
    from sklearn.linear_model import LinearRegression
    from sklearn.multioutput import MultiOutputRegressor
    from sklearn.neural_network import MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    if model == "LinearRegression":
        return LinearRegression()
    if model == "HistGradientBoostingRegressor":
        return MultiOutputRegressor(HistGradientBoostingRegressor(random_state=seed))
    network = make_pipeline(StandardScaler(), MLPRegressor(max_iter=2000, random_state=seed))
    return TransformedTargetRegressor(network, transformer=StandardScaler())


main = study.create_table_program(RegressionTable, __doc__)

if __name__ == "__main__":
    sys.exit(main())
