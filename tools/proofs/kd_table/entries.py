"""The rows of the digits table: every loss and every kind of teacher, as changes to a config.

Weights bring each term to about the size of the task loss early in a run and were not searched
for; alpha is the config's 0.9 for losses that can stand alone, 0.5 for those beside the labels. The
weights of rows that docs/distillation.md does not show yet are guesses that no run has tried.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from utils.json_types import JsonObject

STUDENT = "configs/digits_kd.yaml"
ALONE = "configs/digits_student.yaml"
TEACHER = "configs/digits_teacher.yaml"
TOKEN = "configs/kd/digits_deit_token.yaml"
POOLED = {"fc_norm": "fc_norm"}  # the class token's vector before the head
MAPS = {"patch_embed.proj": "patch_embed.proj"}  # the only maps of a ViT
TAUGHT = ("--distill.teacher_weights={store}/teacher-seed{seed}",)


@dataclass(frozen=True)
class Entry:
    """One row.

    Args:
      what: a few words for the table.
      config: the YAML that it changes.
      losses: distill.losses of the run; empty: as the YAML says.
      flags: further flags; `{store}`, `{cache}`, `{seed}` and `{other}` (another seed)
        are filled in.
      cache_top_k: classes to store beforehand; 0: nothing is stored.
      compare_with: the row that a gain counts from.
      own_epochs: train as long as the YAML says, not as long as the table's other students.
    """

    name: str
    what: str
    config: str = STUDENT
    losses: tuple[JsonObject, ...] = ()
    flags: tuple[str, ...] = TAUGHT
    cache_top_k: int = 0
    compare_with: str = "alone"
    own_epochs: bool = False


def _create_logit(
    name: str, weight: float = 1.0, alpha: float = 0.9, what: str = "", **args: Any
) -> Entry:
    """A row of one loss on logits."""
    term = {"name": name, "weight": weight, "args": args}
    flags = (*TAUGHT, "--distill.loss=", f"--distill.alpha={alpha}")
    return Entry(name, what or _describe(term), losses=(term,), flags=flags)


def _create_feature(
    name: str, weight: float, layers: dict[str, str] = POOLED, **args: Any
) -> Entry:
    """A row of one loss on activations, beside the labels alone."""
    term = {"name": name, "weight": weight, "layers": layers, "args": args}
    flags = (*TAUGHT, "--distill.loss=", "--distill.alpha=0.5")
    return Entry(name, _describe(term), losses=(term,), flags=flags)


def _create_ensemble(name: str, ensemble: str, loss: str, what: str, **args: Any) -> Entry:
    """A row with two teachers, of two seeds."""
    term = {"name": loss, "weight": 1.0, "args": args}
    paths = ("{store}/teacher-seed{seed}", "{store}/teacher-seed{other}")
    teachers = json.dumps([{"weights": path} for path in paths])
    flags = (
        "--distill.teacher=", "--distill.loss=", f"--distill.teachers={teachers}",
        f"--distill.ensemble={ensemble}",
    )  # fmt: skip
    return Entry(name, what, losses=(term,), flags=flags)


def _create_cached(name: str, loss: str, top_k: int, what: str) -> Entry:
    """A row that is taught by stored answers."""
    term = {"name": loss, "weight": 1.0}
    flags = (*TAUGHT, "--distill.loss=", "--distill.teacher_cache={cache}")
    return Entry(name, what, losses=(term,), flags=flags, cache_top_k=top_k)


def _describe(term: JsonObject) -> str:
    """Weight, arguments and layers in a few words."""
    parts = [f"weight {term['weight']:g}"]
    parts += [f"{key} {value}" for key, value in term["args"].items()]
    parts += [f"`{student}`" for student in term.get("layers", {})]
    return ", ".join(parts)


TEACHING = Entry("teacher", "`digits_teacher.yaml`", TEACHER, flags=(), own_epochs=True)

_ALONE = (
    Entry("alone", "labels only", ALONE, flags=()),
    Entry("alone_ema", "labels only, its average evaluated", ALONE,
          flags=("--train.ema=true", "--train.ema_decay=0.98")),
    Entry("alone_token", "student with a distillation token, labels only", TOKEN,
          flags=("--distill.teacher=", "--distill.loss="), compare_with="alone_token"),
)  # fmt: skip

_LOGITS = (
    _create_logit("kd"),
    _create_logit("reverse_kl"),
    _create_logit("jsd", weight=4.0, beta=0.5),
    _create_logit("abkd", weight=32.0),
    _create_logit("normkd"),
    _create_logit("ctkd", curriculum_steps=500),
    _create_logit("hard", alpha=0.5),
    _create_logit("dkd", alpha=0.5, beta=2.0),
    _create_logit("nkd", alpha=0.5, gamma=1.5, temperature=1.0),
    _create_logit("wsld", weight=0.3, temperature=2.0),
    _create_logit("rld", alpha=0.5),
    _create_logit("wkd_l", alpha=0.5, teacher_head="head"),
    _create_logit("dist", weight=0.1, alpha=0.5),
    _create_logit("ttm", weight=16.0),
    _create_logit("wttm", weight=4.0),
    _create_logit("ofa", temperature=1.0),
    _create_logit("mlkd_bc", weight=300.0, alpha=0.5),
    _create_logit("mlkd_cc", weight=100.0, alpha=0.5),
    _create_logit("bkd", alpha=0.5),
    _create_logit("lskd", loss="kd"),
    _create_logit("lskd_dkd", weight=0.3),
    _create_logit("bv_kl"),
    _create_logit("bv_hard", alpha=0.5),
    _create_logit("bv_l2", weight=0.05),
    _create_logit("bv_euclidean", weight=0.2),
    _create_logit("bv_logsoftmax_euclidean", weight=0.2),
    Entry("deit_soft", "distillation token", TOKEN, ({"name": "deit_soft"},),
          (*TAUGHT, "--distill.loss="), compare_with="alone_token"),
    Entry("deit_hard", "distillation token", TOKEN, compare_with="alone_token"),
)  # fmt: skip

_FEATURES = (
    _create_feature("fitnet", 1.0),
    _create_feature("at", 200.0, MAPS),
    _create_feature("at_paper", 10.0, MAPS),
    _create_feature("hcl", 3.0, MAPS),
    _create_feature("rkd", 0.5),
    _create_feature("rkd_unit", 0.5),
    _create_feature("sp", 15.0),
    _create_feature("pkt", 300.0),
    _create_feature("cckd", 50.0, kernel="unit_gaussian"),
    _create_feature("cckd_paper", 20.0, kernel="unit_gaussian"),
    _create_feature("cc_delta", 10.0),
    _create_feature("crd", 0.1, num_examples=1197, negatives=256),
    _create_feature("nst", 10.0, MAPS),
    _create_feature("cwd", 1.0, MAPS),
    _create_feature("ab", 0.001, MAPS),
    _create_feature("ickd", 1.0, MAPS),
    _create_feature("vid", 1.0, MAPS),
    _create_feature("wkd_f", 0.1, MAPS),
    _create_feature("mgd", 0.001, MAPS),
    _create_feature("srrl", 1.0, teacher_head="head"),
    _create_feature("pad", 1.0),
    _create_feature("srd", 0.1),
    _create_feature("itrd", 0.1),
)

_OTHERS = (
    _create_ensemble("two_probs", "probs", "kd", "two teachers, mean of probabilities"),
    _create_ensemble("two_logits", "logits", "kd", "two teachers, mean of logits"),
    _create_ensemble("multi_avg_prob", "separate", "multi_avg_prob", "two teachers, inside kd"),
    _create_ensemble("multi_avg_logit", "separate", "multi_avg_logit", "two teachers, inside kd"),
    _create_ensemble("multi_avg_loss", "separate", "multi_avg_loss", "two teachers, two losses"),
    _create_ensemble("multi_sum", "separate", "multi_sum", "two teachers, losses added"),
    _create_ensemble("multi_sum_bv", "separate", "multi_sum_bv", "two teachers, bv_kl added"),
    Entry("ema_teacher", "teacher: the student's own average", ALONE, ({"name": "kd"},),
          ("--distill.teacher=ema", "--train.ema=true", "--train.ema_decay=0.98"),
          compare_with="alone_ema"),
    Entry("born_again", "teacher: the finished run `alone`", STUDENT, ({"name": "kd"},),
          ("--distill.loss=", "--distill.teacher_weights={store}/alone-seed{seed}")),
    _create_cached("cached_kd_k10", "kd", 10, "kd on stored answers, all 10 classes"),
    _create_cached("cached_kd_k3", "kd", 3, "kd on stored answers, k = 3"),
    _create_cached("tinyvit_sparse", "tinyvit_sparse", 3, "stored answers, k = 3"),
)  # fmt: skip


def _create_recipe(name: str, compare_with: str = "alone") -> Entry:
    """A row of one YAML below configs/kd as it is."""
    config = f"configs/kd/digits_{name}.yaml"
    return Entry(
        f"digits_{name}", f"`{config}`", config, compare_with=compare_with, own_epochs=True
    )


def _create_untaught(name: str) -> Entry:
    """The same YAML without its teacher: what its length and mixing give by themselves."""
    row, drop = f"{name}_alone", ("--distill.teacher=", "--distill.loss=")
    config = f"configs/kd/digits_{name}.yaml"
    return Entry(row, "the next row without its teacher", config, (), drop, 0, row, True)


_RECIPES = (
    _create_recipe("dkd"),
    _create_recipe("dist"),
    _create_recipe("cached"),
    _create_untaught("patient"),
    _create_recipe("patient", "patient_alone"),
    _create_untaught("vanillakd"),
    _create_recipe("vanillakd", "vanillakd_alone"),
)

ENTRIES = (*_ALONE, *_LOGITS, *_FEATURES, *_OTHERS, *_RECIPES)
