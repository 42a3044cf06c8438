"""`schemas`: the forms of files, for programs of others."""

from __future__ import annotations

import argparse

from store.query.schemas import MODELS, format_schema
from utils.programs import prepare_folder


def write_schemas(options: argparse.Namespace) -> None:
    """Write a JSON Schema for each file and line of a run directory."""
    prepare_folder(options.out, "--out")
    for name in MODELS:
        path = options.out / f"{name}.json"
        path.write_text(format_schema(name), encoding="utf-8")
        print(path)
