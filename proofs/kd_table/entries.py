"""The methods of the table: every loss that a student of the table can be taught by.

A weight here is where the search begins and no more: what the table trains with is the best of its
multiples on the validation split. All runs have alpha 0.5, so the weight alone says how much the
teacher counts beside the labels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from utils.json_types import JsonObject

POOLED = {"fc_norm": "fc_norm"}  # the class token's vector before the head
MAPS = {"patch_embed.proj": "patch_embed.proj"}  # the only maps of a ViT
EXAMPLES = "{train_examples}"  # of the set, filled in; so are its classes
CLASSES = "{classes}"
STRONG = "{strong_pp}"


@dataclass(frozen=True)
class Entry:
    """One method.

    Args:
      term: of `distill.losses`, with the weight that the search begins with.
      teachers: 2: each answers for itself, `distill.ensemble: separate`.
      settings: what else the method is: further views, which multiply the student's work.
    """

    name: str
    term: JsonObject
    teachers: int = 1
    settings: JsonObject = field(default_factory=dict)


def _create_logit(name: str, weight: float = 1.0, **args: Any) -> Entry:
    """One loss on logits."""
    return Entry(name, {"name": name, "weight": weight, "args": args})


def _create_feature(
    name: str, weight: float, layers: dict[str, str] = POOLED, **args: Any
) -> Entry:
    """One loss on activations."""
    return Entry(name, {"name": name, "weight": weight, "layers": layers, "args": args})


def _create_ensemble(name: str, weight: float = 1.0) -> Entry:
    """One loss on the answers of two teachers of two seeds."""
    return Entry(name, {"name": name, "weight": weight, "args": {}}, teachers=2)


_LOGITS = (
    _create_logit("kd"),
    _create_logit("reverse_kl"),
    _create_logit("jsd", weight=4.0, beta=0.5),
    _create_logit("abkd", weight=32.0),
    _create_logit("normkd"),
    _create_logit("ctkd", curriculum_steps=500),
    _create_logit("hard"),
    _create_logit("dkd", beta=2.0),
    _create_logit("nkd", gamma=1.5, temperature=1.0),
    _create_logit("wsld", weight=0.3, temperature=2.0),
    _create_logit("rld"),
    _create_logit("wkd_l", teacher_head="head"),
    _create_logit("dist", weight=0.1),
    _create_logit("ldrld", weight=0.3),
    _create_logit("skd"),
    _create_logit("ttm", weight=16.0),
    _create_logit("wttm", weight=4.0),
    _create_logit("ofa", temperature=1.0),
    _create_logit("mlkd_bc", weight=300.0),
    _create_logit("mlkd_cc", weight=100.0),
    _create_logit("bkd"),
    _create_logit("lskd", loss="kd"),
    _create_logit("lskd_dkd", weight=0.3),
    _create_logit("bv_kl"),
    _create_logit("bv_hard"),
    _create_logit("bv_l2", weight=0.05),
    _create_logit("bv_euclidean", weight=0.2),
    _create_logit("bv_logsoftmax_euclidean", weight=0.2),
)

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
    _create_feature("crd", 0.1, num_examples=EXAMPLES, negatives=256),
    _create_feature("nst", 10.0, MAPS),
    _create_feature("cwd", 1.0, MAPS),
    _create_feature("ab", 0.001, MAPS),
    _create_feature("ickd", 1.0, MAPS),
    _create_feature("dist_plus", 0.1, MAPS),
    _create_feature("ft", 0.3, MAPS, paraphrase_steps=200),
    _create_feature("nd", 1.0, num_classes=CLASSES),
    _create_feature("semckd", 1.0, MAPS),
    _create_feature(
        "vitkd", 1.0, {"norm_pre": "norm_pre", "norm": "norm"}, low_weight=0.01, high_weight=0.001
    ),
    _create_feature("scalekd", 0.1, {"patch_embed.proj": "norm"}, heads=4),
    _create_feature("vid", 1.0, MAPS),
    _create_feature("wkd_f", 0.1, MAPS),
    _create_feature("mgd", 0.001, MAPS),
    _create_feature("srrl", 1.0, teacher_head="head"),
    _create_feature("pad", 1.0),
    _create_feature("srd", 0.1),
    _create_feature("itrd", 0.1),
)

_ENSEMBLES = tuple(
    _create_ensemble(name)
    for name in (
        "multi_avg_prob", "multi_avg_logit", "multi_avg_loss", "multi_sum", "multi_sum_bv",
    )
)  # fmt: skip

_TWO_VIEWS = {"distill.views": "weak_strong", "data.strong_pp": STRONG}
# Limits that the paper leaves to the user: what a teacher is to be sure of, in both views.
_SURE = {"weak_confidence": 0.5, "strong_confidence": 0.5}
_VIEWS = (
    Entry("mlkd", {"name": "mlkd", "weight": 1.0, "args": {}}, settings=_TWO_VIEWS),
    Entry("crld", {"name": "crld", "weight": 1.0, "args": _SURE}, settings=_TWO_VIEWS),
)

_TURNED = (
    Entry(
        "sskd",
        {"name": "sskd", "weight": 1.0, "layers": POOLED, "args": {"head_steps": 60}},
        settings={"distill.views": "rotations"},
    ),
)

ENTRIES = (*_LOGITS, *_FEATURES, *_ENSEMBLES, *_VIEWS, *_TURNED)

# Registered losses that are no row -> why not. Other names of a row are not even here.
_CONVNET = "matches maps of convnets; the table's student is a ViT"
_TOKEN = "needs a student with a distillation token, which is another student"
_NUMBERS = "compares numbers, not classes"
_EMBEDDINGS = "is for students without labels, which probes judge"
UNSERVED = {
    "bv_agree": "is a measure without a gradient",
    "simkd": "needs a student that answers by the teacher's classifier, which is another student",
    "norm": "needs a student whose last maps are widened, which is another student",
    "bce_kd": "takes sigmoids of logits, which a teacher of softmax has not learnt",
    "tinyvit_sparse": "replays stored answers, which are of one seed's stream",
    "deit_soft": _TOKEN,
    "deit_hard": _TOKEN,
    "cat_kd": _CONVNET,
    "fsp": _CONVNET,
    "ofd": _CONVNET,
    "reviewkd": _CONVNET,
    "sdd": _CONVNET,
    "gram_kl": _EMBEDDINGS,
    "gram_mse": _EMBEDDINGS,
    "queue_kl": _EMBEDDINGS,
    "prediction_mse": _NUMBERS,
    "prediction_mae": _NUMBERS,
    "prediction_huber": _NUMBERS,
}
