"""A start from any position gives the batches of the uninterrupted run."""

from __future__ import annotations

import hashlib
import itertools
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from datasets import Batch, Position
from tests.support.input_data import create_section, open_loader, write_records
from utils.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
BATCH = 16
BATCHES_PER_EPOCH = 12
# Starts, an epoch's last batch (so across the border), a border and the middle of a later epoch.
POSITIONS = ((0, 1), (0, 6), (0, 11), (1, 0), (1, 7))
FOLLOWED = 3
ORDERS = ("exact", "sharded")
# A window of about twenty records, so that positions lie before, in and after windows.
SHUFFLE_GIB = 5e-6
CASES = [
    (order, index, count)
    for order in ORDERS
    for count, chosen in ((1, (0,)), (2, (0, 1)), (8, (0, 3, 7)))
    for index in chosen
]


def get_config(root: Path):
    pp = "decode|resize(8)|random_crop(6)|flip_lr|value_range(-1, 1)"
    return {o: create_section(root, order=o, train_pp=pp, shuffle_gib=SHUFFLE_GIB) for o in ORDERS}


def get_digest(batch: Batch) -> str:
    tensors = (batch.images, batch.labels, batch.indices)
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()


def resume_everywhere(root: Path) -> dict[str, list[str]]:
    """Digests of the batches after each position, by case and position."""
    digests = {}
    for order, index, count in CASES:
        loader = open_loader(get_config(root)[order], "train", shard=(index, count))
        for epoch, batch in POSITIONS:
            batches = loader.batches(Position(epoch, batch * BATCH))
            key = f"{order} {index} {count} {epoch} {batch}"
            digests[key] = [get_digest(b) for b in itertools.islice(batches, FOLLOWED)]
    return digests


@pytest.fixture(scope="module")
def resumed(records_root) -> dict[str, list[str]]:
    """What another process delivers when it starts at each position."""
    program = (
        "import json; from pathlib import Path; from tests.test_datasets_resume import *;"
        f"print(json.dumps(resume_everywhere(Path({str(records_root)!r}))))"
    )
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return json.loads(result.stdout.splitlines()[-1])


@pytest.mark.parametrize(("order", "index", "count"), CASES)
def test_a_new_process_continues_with_the_uninterrupted_runs_batches(
    records_root, resumed, order, index, count
):
    loader = open_loader(get_config(records_root)[order], "train", shard=(index, count))
    length = 2 * BATCHES_PER_EPOCH
    unbroken = [get_digest(batch) for batch in itertools.islice(loader.batches(), length)]
    assert len(set(unbroken)) == length
    for epoch, batch in POSITIONS:
        first = epoch * BATCHES_PER_EPOCH + batch
        expected = unbroken[first : first + FOLLOWED]
        assert resumed[f"{order} {index} {count} {epoch} {batch}"] == expected


@pytest.mark.parametrize("order", ORDERS)
def test_a_resume_decodes_nothing_that_was_consumed(tmp_path, order):
    write_records(tmp_path / "whole")
    consumed = 10 * BATCH
    loader = open_loader(get_config(tmp_path / "whole")[order], "train")
    batches = list(itertools.islice(loader.batches(), 11))
    done = torch.cat([batch.indices for batch in batches[:10]]).tolist()
    # The same records, but whatever was consumed is no image any more.
    write_records(tmp_path / "broken", broken=tuple(done))
    config = create_section(
        tmp_path / "broken",
        order=order,
        train_pp="decode|resize(8)|random_crop(6)|flip_lr|value_range(-1, 1)",
        shuffle_gib=SHUFFLE_GIB * get_record_bytes(tmp_path / "broken", tmp_path / "whole"),
    )
    batch = next(open_loader(config, "train").batches(Position(0, consumed)))
    assert get_digest(batch) == get_digest(batches[10])


def get_record_bytes(root: Path, base: Path) -> float:
    """How much larger records are than those below another root; keeps windows of equal length."""
    sizes = [
        sum(f.stat().st_size for f in (r / "records" / "1.0.0").glob("records-train*"))
        for r in (root, base)
    ]
    return sizes[0] / sizes[1]


def test_the_sharded_order_refuses_another_number_of_shards_within_an_epoch(records_root):
    config = get_config(records_root)["sharded"]
    position = Position(0, BATCH, shard_count=2)
    next(open_loader(config, "train", shard=(1, 2)).batches(position))
    with pytest.raises(UserError, match=r"data\.order=sharded.*begun with 2.*data\.order=exact"):
        open_loader(config, "train", shard=(0, 4)).batches(position)


def test_the_exact_order_takes_another_number_of_shards_within_an_epoch(records_root):
    config = get_config(records_root)["exact"]
    position = Position(0, BATCH, shard_count=2)
    one = next(open_loader(config, "train").batches(position))
    parts = [next(open_loader(config, "train", shard=(i, 4)).batches(position)) for i in range(4)]
    assert torch.equal(one.images, torch.cat([part.images for part in parts]))


def test_a_position_beyond_the_split_is_refused(records_root):
    loader = open_loader(get_config(records_root)["exact"], "train")
    with pytest.raises(UserError, match="split has 203 examples"):
        loader.batches(Position(0, 5000))
