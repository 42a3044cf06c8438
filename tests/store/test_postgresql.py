"""The index on a real PostgreSQL gives the answers of SQLite: `pytest -m slow`."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from store.index.database import RunIndex
from tests.support.stored_runs import make_config, make_run
from utils.errors import UserError

_FOLDERS = (
    *map(Path, os.environ.get("PATH", "").split(":")),
    *Path("/usr/lib").glob("postgresql/*/bin"),
)
SERVER = next((one for one in _FOLDERS if (one / "initdb").is_file()), None)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("psycopg") is None, reason="psycopg is not installed"),
    pytest.mark.skipif(SERVER is None, reason="PostgreSQL is not installed: initdb is not found"),
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server of this test alone, reached by a socket in its own directory."""
    with tempfile.TemporaryDirectory(prefix="pg-") as folder:
        # The server refuses to be root.
        user = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"]
        before = user if os.geteuid() == 0 else []
        if before:
            shutil.chown(folder, 65534, 65534)
        data = f"{folder}/data"

        def call(*command: str) -> None:
            subprocess.run([*before, *command], check=True, capture_output=True, cwd=folder)

        call(f"{SERVER}/initdb", "-D", data, "-U", "tester", "--auth=trust", "--no-sync")
        options = f"-c listen_addresses= -c unix_socket_directories={folder} -c fsync=off"
        call(f"{SERVER}/pg_ctl", "-D", data, "-o", options, "-l", f"{folder}/log", "-w", "start")
        try:
            yield f"postgresql+psycopg://tester@/postgres?host={folder}"
        finally:
            call(f"{SERVER}/pg_ctl", "-D", data, "-m", "immediate", "stop")


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """Forty runs of several configurations."""
    folder = tmp_path_factory.mktemp("runs")
    draw = random.Random(3)
    for number in range(40):
        config = make_config(
            **{
                "train.seed": number % 5,
                "optim.lr": draw.choice([0.1, 0.01, 1e-3]),
                "model.name": draw.choice(["vit_tiny", "resnet", "Ünïcode", "with 'quotes'"]),
            }
        )
        final = {"eval_top1": draw.choice([1.0, 50.5, float("nan"), float("inf")])}
        make_run(
            folder,
            f"run{number}",
            config=config,
            final=final if number % 7 else None,
            experiment=f"experiment{number % 3}",
        )
    return folder


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def make_filter(draw: random.Random) -> str:
    """A filter of up to three comparisons, most of them with some answer."""
    terms = []
    for _ in range(draw.randint(1, 3)):
        key, values = draw.choice(
            [
                ("train.seed", ["0", "3", "9"]),
                ("optim.lr", ["0.1", "0.01", "1e-3"]),
                ("eval.top1", ["50.5", "nan", "inf", "1"]),
                ("model.name", ["resnet", "'Ünïcode'"]),
                ("status", ["complete", "running"]),
                ("experiment", ["experiment1"]),
                ("step", ["4"]),
            ]
        )
        operators = ["=", "!=", "~"] + (["<", ">", "<=", ">="] if values[0][0].isdigit() else [])
        term = f"{key}{draw.choice(operators)}{draw.choice(values)}"
        terms.append(draw.choice(["", "not "]) + term)
    return f" {draw.choice(['and', 'or'])} ".join(terms)


def test_sqlite_and_postgresql_answer_200_queries_alike(root, url):
    indexes = [RunIndex(str(root)), RunIndex(str(root), url)]
    assert [index.refresh().read for index in indexes] == [40, 40]
    assert indexes[0].read_keys() == indexes[1].read_keys()
    draw, sizes = random.Random(16), set()
    for _ in range(200):
        text = make_filter(draw)
        found = [[row["path"] for row in index.read_runs(index.select(text))] for index in indexes]
        assert found[0] == found[1], text
        sizes.add(len(found[0]))
    assert len(sizes) > 10
    for key in indexes[0].read_keys():
        answers = [{k: repr(v) for k, v in index.read_column(key).items()} for index in indexes]
        assert answers[0] == answers[1], key


def test_a_server_follows_the_files_of_several_stores(root, url, tmp_path):
    copy = tmp_path / "runs"
    shutil.copytree(root, copy)
    index = RunIndex(str(copy), url)
    assert index.refresh().rebuilt
    shutil.rmtree(copy / "experiment0")
    make_run(copy, "late", final={"eval_top1": 99.0})
    done = index.refresh()
    assert (done.rebuilt, done.removed) == (False, 14)
    assert len(index.select("eval.top1=99")) == 1
    assert len(RunIndex(str(root), url).select("")) == 40
    index.close()


def test_an_unreachable_server_gives_one_line(root):
    away = "postgresql+psycopg://tester:" + "secret@/postgres?host=/nowhere"
    with pytest.raises(UserError, match="cannot be used") as caught:
        RunIndex(str(root), away).refresh()
    assert "secret" not in str(caught.value)
