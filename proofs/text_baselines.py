"""What a model of bytes has to beat: bits a byte of simple models and packers on the same files.

    python -m proofs.text_baselines data/stdlib_byte --run runs/transformer_text/RUN

Unigram and bigram count the training split's bytes (one is added to each count) and are measured
on the held-out split, ends of files included, as a model is. The packers see the held-out files
alone, as one text. A run's figure is the one that it has measured itself.
"""

from __future__ import annotations

import argparse
import gzip
import lzma
import math
import sys
from collections.abc import Sequence

import numpy as np

from big_vision.input.text.tokenizer import ByteTokenizer
from big_vision.input.text.tokens import open_tokens, read_token_index
from store.record.runs import Run
from utils.errors import UserError
from utils.programs import create_program_parser, run_program
from utils.storage.places import to_path

_PREFIX = {"validation": "eval_", "test": "test_"}


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table; gives the exit code."""
    arguments = create_parser().parse_args(argv)
    return run_program(lambda: print(format_table(measure(arguments))))


def create_parser() -> argparse.ArgumentParser:
    """Create the command line."""
    parser = create_program_parser(__doc__, prog="python -m proofs.text_baselines")
    parser.add_argument("data", metavar="DATA", help="directory of tokens.json")
    parser.add_argument("--split", choices=_PREFIX, default="test", help="held out (default test)")
    parser.add_argument("--run", action="append", default=[], help="finished run; may be repeated")
    return parser


def measure(arguments: argparse.Namespace) -> dict[str, float]:
    """Bits a byte by name.

    Raises:
      UserError: the data are not bytes, or a run has not measured that split.
    """
    directory = to_path(arguments.data, "DATA")
    index = read_token_index(directory, "DATA")
    if index.tokenizer != ByteTokenizer.kind:
        raise UserError(f"DATA ({arguments.data}) holds tokens of {index.tokenizer}, not bytes")
    train, held_out = (
        np.asarray(open_tokens(directory / f"{split}.bin", index)).astype(np.int64)
        for split in ("train", arguments.split)
    )
    text = held_out[held_out != index.end].astype(np.uint8).tobytes()
    rows = {
        "unigram": measure_unigram(train, held_out, index.vocab_size) / len(text),
        "bigram": measure_bigram(train, held_out, index.vocab_size) / len(text),
        "gzip -9": 8 * len(gzip.compress(text, 9, mtime=0)) / len(text),
        "xz -9": 8 * len(lzma.compress(text, preset=9)) / len(text),
    }
    for run in arguments.run:
        rows[run] = read_run(run, f"{_PREFIX[arguments.split]}bits_per_byte")
    return rows


def measure_unigram(train: np.ndarray, held_out: np.ndarray, size: int) -> float:
    """Bits of all held-out tokens by how often each came in training."""
    counts = np.bincount(train, minlength=size) + 1.0
    return float(-np.log2(counts / counts.sum())[held_out].sum())


def measure_bigram(train: np.ndarray, held_out: np.ndarray, size: int) -> float:
    """Bits of all held-out tokens but the first by what came behind the one before in training."""
    pairs = np.bincount(train[:-1] * size + train[1:], minlength=size * size)
    counts = pairs.reshape(size, size) + 1.0
    bits = -np.log2(counts / counts.sum(axis=1, keepdims=True))
    return float(bits[held_out[:-1], held_out[1:]].sum())


def read_run(path: str, name: str) -> float:
    """Read a number that a finished run has written at its end."""
    value = Run(to_path(path, "--run")).read().get("final", {}).get(name, math.nan)
    if not math.isfinite(value):
        raise UserError(f"--run ({path}) has no {name}; finish it with data.test_split=test")
    return value


def format_table(found: dict[str, float]) -> str:
    """Format a Markdown table, the worst first."""
    rows = sorted(found.items(), key=lambda row: -row[1])
    lines = [f"| {name} | {value:.3f} |" for name, value in rows]
    return "\n".join(["| model | bits a byte |", "|---|---:|", *lines])


if __name__ == "__main__":
    sys.exit(main())
