"""The language of filters: what matches, and errors of invalid ones."""

from __future__ import annotations

import math

import pytest

from store.query.filters import check_keys, parse_filter
from utils.errors import UserError

RUN = {
    "data.name": "imagenet2012",
    "eval.top1": 71.5,
    "eval.loss": math.nan,
    "train.seed": 3,
    "train.ema": True,
    "optim.betas": [0.9, 0.999],
    "optim.eps": 1e-8,
    "tag": ["paper", "v2"],
    "status": "complete",
    "model.name": "vit_small_patch16_224",
    "data.train_pp": "a|flip lr",
}

FITS = [
    "",
    "data.name=imagenet2012 and eval.top1>70",
    "eval.top1>=71.5",
    "not eval.top1<71.5",
    "train.seed=3",
    "train.seed=3.0",
    "train.seed != 4",
    "train.ema=true",
    "train.ema=True",
    "optim.betas='[0.9, 0.999]'",
    "optim.eps=1e-8",
    "optim.eps<0.001",
    "tag=paper",
    "tag=v2",
    "tag!=best",
    "model.name~small",
    "model.name~vit_*_224",
    'data.train_pp="a|flip lr"',
    "eval.loss=nan",
    "not eval.loss>0 and not eval.loss<=0",
    "eval.top1",
    "not test.top1",
    "status=failed or (train.seed=3 and tag=v2)",
    "status=failed or train.seed=3 and tag=v2",
    "model.weights=none",
    "train.seed == 3",
]
FITS_NOT = [
    "eval.top1>71.5",
    "test.top1!=3",
    "train.seed='3.0'",
    "tag=paper and tag=best",
    "tag!=paper",
    "eval.loss!=nan",
    "status=complete and (train.seed=4 or tag=best)",
    "data.name>3",
    "model.name~vit_t",
    "not not test.top1",
    "train.ema=1",
]


@pytest.mark.parametrize(
    ("text", "expected"), [(t, True) for t in FITS] + [(t, False) for t in FITS_NOT]
)
def test_a_filter_selects_matching_runs(text, expected):
    assert parse_filter(text).fits(RUN.get) == expected


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("a=", "ends where a value"),
        ("a=1 b=2", "missing before 'b = 2'"),
        ("=3", "a key is missing"),
        ("(a=1", "a bracket is not closed"),
        ("a=1)", "missing before"),
        ("a>x", "'x' is no number"),
        ("a='x", "cannot be read"),
        ("a=1 and", "ends where a key"),
        ("a=1 or or", "a key is missing"),
        ("not", "ends where a key"),
        ("a=!", "cannot be read"),
        ("a==(1)", "a value is missing"),
    ],
)
def test_an_invalid_filter_is_refused_in_one_line(text, word):
    with pytest.raises(UserError) as caught:
        parse_filter(text)
    assert word in str(caught.value)


def test_a_typo_names_the_nearest_key():
    known = ["eval.top1", "train.seed", "optim.lr"]
    for text, near in (
        ("train.seed=1 and evl.top1>3", "eval.top1"),
        ("lr>1", "optim.lr"),
        ("optm.l>1", "optim.lr"),
    ):
        with pytest.raises(UserError, match=f"did you mean '{near}'"):
            check_keys(parse_filter(text).keys, known)
    check_keys(parse_filter("eval.top1>3").keys, known)


def test_runs_that_lack_a_key_are_distinguished_in_columns():
    wanted = parse_filter("a>1 or b=x")
    assert wanted.keys == {"a", "b"}
    columns = {"a": {1: 2.0, 2: 0.5}, "b": {3: "x"}}
    fitting = [r for r in (3, 1, 2) if wanted.fits(lambda key, r=r: columns[key].get(r))]
    assert fitting == [3, 1]
