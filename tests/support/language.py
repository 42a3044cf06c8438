"""A tiny language model of copied symbols, as flags and in parts."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from datasets import TokenBatch, create_loader
from job.check import check
from models.factory import create_model
from tasks.language.task import Language
from tools.prepare_dataset.__main__ import main as prepare
from utils.config.load import load_config

LANGUAGE = (
    "--train.task=language",
    "--data.source=sequences",
    "--model=transformer",
    "--data.name=copy,symbols=4,num_examples=640,num_held_out=100",
    "--data.sequence_length=8",
    '--model.args={"depth": 2, "width": 32, "heads": 4, "kv_heads": 2}',
    "--data.global_batch_size=16",
    "--optim.lr=0.01",
    "--optim.warmup_steps=5",
    "--train.log_every_steps=1",
    "--run.experiment=lang",
    "--run.run_id=a",
    "--run.tensorboard=false",
    "--runtime.num_threads=1",
    "--runtime.graph_budget=100000",
)

# What makes such models learn their sequences within a few hundred steps.
LEARNING = (
    "--model.args.positions=learned",
    "--data.global_batch_size=64",
    "--optim.lr=0.006",
    "--optim.warmup_steps=20",
    "--optim.weight_decay=0.01",
    "--optim.betas=[0.9, 0.95]",
    "--optim.max_grad_norm=1",
)


def create_language_argv(folder: Path, *flags: str, device: str = "cpu") -> list[str]:
    """The flags of a run."""
    return [*LANGUAGE, f"--run.output_dir={folder}", f"--runtime.device={device}", *flags]


def create_task(folder: Path, *flags: str) -> tuple[Language, nn.Module, TokenBatch]:
    """The task, a student of seed 0 and a batch of its training split."""
    config = load_config(create_language_argv(folder, *flags))
    loaders = {role: create_loader(config.data, role, seed=0) for role in ("train", "eval")}
    facts = check(config).facts
    torch.manual_seed(0)
    student = create_model(config.model, **facts.model_arguments)
    return Language(config, facts, loaders), student, next(loaders["train"].batches())


def write_tokens(root: Path, *names: str) -> None:
    """A small dataset of bytes below a root, under each of the names."""
    write_texts(root / "texts", 40)
    for name in names:
        argv = ["text", "--from", str(root / "texts"), "--out", str(root), "--name", name]
        assert prepare(argv) == 0


def write_texts(folder: Path, count: int) -> None:
    """Small files of text, each of which says a word of its own again and again."""
    folder.mkdir(parents=True)
    for number in range(count):
        word = "word" + "".join(chr(97 + (number * 7 + place * place) % 26) for place in range(8))
        text = f"ü {number}\n" + f"{word} und noch\n" * (20 + number)
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
