"""The sets of the table: what their student and their teacher are, as changes to two configs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from utils.json_types import JsonObject

STUDENT = "configs/digits_student.yaml"
TEACHER = "configs/digits_teacher.yaml"


@dataclass(frozen=True)
class TableSet:
    """One dataset, of `python -m tools.prepare_dataset NAME`.

    Args:
      train_examples, classes: that some methods must be told.
      strong_pp: the second view, of methods that compare two.
      what: its size and difficulty, for the reader.
      data: keys of every run on it.
      student, teacher: further keys of those.
      unserved: methods that cannot teach this student -> why.
    """

    name: str
    train_examples: int
    classes: int
    strong_pp: str
    what: str
    data: JsonObject = field(default_factory=dict)
    student: JsonObject = field(default_factory=dict)
    teacher: JsonObject = field(default_factory=dict)
    unserved: Mapping[str, str] = field(default_factory=dict)


_FONTS_PP = "decode(channels=1)|resize(16)|value_range(-1, 1)"
# At least half of the image's area, as large as the whole.
_STRONG_PP = "decode(channels=1)|inception_crop({}, area_min=50)|value_range(-1, 1)"

SETS = {
    "digits": TableSet(
        "digits", 1197, 10, _STRONG_PP.format(8),
        "10 classes, 8 x 8, 1,197 examples to train on, 300 to choose by, 300 to test; the nearest "
        "neighbour in pixels errs on 2.3 % of the test split",
        unserved={"vitkd": "asks for the teacher's grid of patches, which is finer there"},
    ),
    "fonts": TableSet(
        "fonts", 2976, 62, _STRONG_PP.format(16),
        "62 classes, 16 x 16, 2,976 / 496 / 992 examples, other typefaces in each split; the "
        "nearest neighbour in pixels errs on 58.3 % of the test split",
        data={
            "data.name": "fonts", "data.train_pp": _FONTS_PP, "data.eval_pp": _FONTS_PP,
            "model.image_size": 16,
        },
        # Patches as on the digits' 2 x 2: with 4 x 4 of them neither learns in such a budget.
        student={"model.args.embed_dim": 64, "model.args.patch_size": 8, "optim.lr": 3.0e-3},
        teacher={"model.args.embed_dim": 128, "model.args.patch_size": 8, "train.mixup_alpha": 0.0},
    ),
}  # fmt: skip
