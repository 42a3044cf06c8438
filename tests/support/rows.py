"""A tiny regression on synthetic rows, as flags."""

from __future__ import annotations

from pathlib import Path

REGRESSION = (
    "--train.task=regress",
    "--data.source=synthetic_rows",
    "--model=mlp",
    "--data.name=friedman1,num_examples=737",
    "--data.train_split=all[:640]",
    "--data.eval_split=all[640:]",
    '--model.args={"widths": [16]}',
    "--data.global_batch_size=32",
    "--optim.lr=0.01",
    "--optim.warmup_steps=5",
    "--train.log_every_steps=1",
    "--run.experiment=rows",
    "--run.run_id=a",
    "--run.tensorboard=false",
    "--runtime.num_threads=1",
    "--runtime.graph_budget=100000",
)


def create_regression_argv(folder: Path, *flags: str, device: str = "cpu") -> list[str]:
    """The flags of a run."""
    return [*REGRESSION, f"--run.output_dir={folder}", f"--runtime.device={device}", *flags]
