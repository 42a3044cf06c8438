"""The catalogue of metrics: unit, direction and nature of each number of a line.

A line of `metrics.jsonl` has a head (`step`, `kind`, `attempt`, `nonfinite`) and numbers by name.
Every number has its entry here; a custom task adds those of its evaluations:
`METRICS.add(Metric("mse", "", "lower", "deterministic", "mean squared error"))`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

from utils.errors import UserError
from utils.json_types import JsonValue

TRAIN, EVAL, EPOCH = KINDS = "train", "eval", "epoch"
# Fields of a line besides its numbers.
HEAD = ("step", "kind", "attempt", "nonfinite")
# Prefix of the parts of a step's loss.
LOSS = "loss/"
_AVERAGE = re.compile(r"ema\d+")
# Numbers with quantiles: two are measured at each step, the last one at log points.
STEP_S, WAIT_S, GRAD_NORM = "step_s", "input_wait_s", "grad_norm"

Direction = Literal["higher", "lower", "none"]
Nature = Literal["deterministic", "clock", "resource"]


@dataclass(frozen=True)
class Metric:
    """Description of a number of a line."""

    name: str  # in a line; `*` stands for any text
    unit: str  # empty if it has none
    direction: Direction  # which way is better
    # `deterministic`: equal in runs that are equal bit for bit; `clock`: a measured time;
    # `resource`: usage by the program, which depends on the machine and the attempt
    nature: Nature
    text: str  # description for people


class MetricRegistry:
    """Metrics by name; an exact name takes precedence over a pattern."""

    def __init__(self, *metrics: Metric) -> None:
        self._metrics: dict[str, Metric] = {}
        self.add(*metrics)

    def add(self, *metrics: Metric) -> None:
        """Add metrics with new names."""
        for metric in metrics:
            if metric.name in self._metrics:
                raise RuntimeError(f"metric {metric.name!r} is already in the catalogue")
            self._metrics[metric.name] = metric

    def find(self, name: str) -> Metric | None:
        """Find a number's entry, or None; `ema2/top1`, of an average, has the entry of `top1`."""
        if name in self._metrics:
            return self._metrics[name]
        average, _, rest = name.partition("/")
        if rest and _AVERAGE.fullmatch(average):
            return self.find(rest)
        patterns = (metric for metric in self if "*" in metric.name)
        return next((metric for metric in patterns if fnmatchcase(name, metric.name)), None)

    def is_deterministic(self, name: str) -> bool:
        """Return whether equal runs have equal values; True for an unknown number."""
        metric = self.find(name)
        return metric is None or metric.nature == "deterministic"

    def require(self, names: Iterable[str]) -> None:
        """Refuse numbers without an entry: they could not be interpreted later."""
        for name in names:
            if self.find(name) is None:
                raise UserError(
                    f"metric {name!r} is not in the catalogue of metrics; add it by "
                    "store.METRICS.add(Metric(...)) beside the task that computes it"
                )

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._metrics.values())


# Numbers of the loop and the input, for any task.
LOOP = (
    Metric("epoch", "epochs", "none", "deterministic", "passes over the training split so far"),
    Metric("lr", "", "none", "deterministic", "learning rate of the step, before group scales"),
    Metric("grad_norm", "", "none", "deterministic", "global norm of the gradient before clipping"),
    Metric("host_reads", "reads", "lower", "deterministic",
           "times the host waited for the device within steps, outside log points"),
    Metric("skipped_corrupt", "records", "lower", "deterministic",
           "unreadable records that were passed over"),
    Metric("time_s", "s", "none", "clock", "wall-clock time of training over all attempts"),
    Metric("epoch_s", "s", "none", "clock",
           "wall-clock time from the last log point of the epoch before, evaluations included"),
    Metric("*_per_s", "1/s", "higher", "clock",
           "what the task counts (images: `img_per_s`) over the time since the last line"),
    Metric("mfu", "", "higher", "clock",
           "matrix products since the last line as a share of the devices' published peak"),
    Metric("input_wait_s", "s", "lower", "clock",
           "time since the last line in which a step waited for its batch"),
    Metric("checkpoint_held_s", "s", "lower", "clock",
           "time since the last line in which the loop waited for a checkpoint"),
    Metric("host_rss_gib", "GiB", "lower", "resource", "resident memory of rank zero's process"),
    Metric("hbm_peak_gib", "GiB", "lower", "resource",
           "most memory that rank zero's device has held since the program began"),
    Metric("duty_cycle", "", "higher", "clock",
           "share of time that rank zero's devices were busy, as they last reported"),
    Metric("executions", "programs", "lower", "resource",
           "programs that ran since the last line, counted on the stand-in of a TPU"),
    Metric("graphs", "graphs", "lower", "resource", "graphs compiled over all attempts"),
    Metric("graphs_train", "graphs", "lower", "resource", "graphs compiled by training steps"),
    Metric("graphs_eval", "graphs", "lower", "resource", "graphs compiled by evaluations"),
)  # fmt: skip
# Numbers of a task: parts of the loss in lines of training, results in lines of evaluation.
LEARNT = (
    Metric(LOSS + "*", "", "lower", "deterministic",
           "a part of the loss before its weight; `loss/total` is what is trained on"),
    Metric("top1", "%", "higher", "deterministic", "examples whose class has the highest logit"),
    Metric("top5", "%", "higher", "deterministic", "examples whose class is among the top five"),
    Metric("loss", "nats", "lower", "deterministic", "mean cross-entropy of labels or next tokens"),
    Metric("perplexity", "", "lower", "deterministic", "exp(loss) of a language model"),
    Metric("bits_per_byte", "bits", "lower", "deterministic",
           "loss over the bytes of text that the predicted tokens stand for"),
    Metric("accuracy", "%", "higher", "deterministic", "tokens that got the highest logit"),
    Metric("ece", "", "lower", "deterministic", "expected calibration error, 0 to 1"),
    Metric("mse", "", "lower", "deterministic",
           "mean squared error in the targets' own units, mean over the targets"),
    Metric("mae", "", "lower", "deterministic", "mean absolute error in the targets' own units"),
    Metric("r2", "", "higher", "deterministic",
           "1 - squared error / variance of the split, mean over the targets"),
    Metric("nll", "nats", "lower", "deterministic",
           "negative log-likelihood of a target under the predicted normal distribution"),
    Metric("mse/*", "", "lower", "deterministic", "mean squared error of one target"),
    Metric("nll/*", "nats", "lower", "deterministic",
           "negative log-likelihood of one target"),
    Metric("mae/*", "", "lower", "deterministic", "mean absolute error of one target"),
    Metric("r2/*", "", "higher", "deterministic", "1 - squared error / variance of one target"),
    Metric("map", "%", "higher", "deterministic",
           "average precision, mean over the classes with an example"),
    Metric("f1_micro", "%", "higher", "deterministic", "F1 over the outputs of all classes"),
    Metric("f1_macro", "%", "higher", "deterministic", "F1 of each class, mean over the classes"),
    Metric("distil_loss", "", "lower", "deterministic",
           "sum of a label-free student's weighted terms on the evaluation split"),
    Metric("distil_loss/*", "", "lower", "deterministic", "one term of it, before its weight"),
    Metric("examples", "examples", "none", "deterministic", "examples that were counted"),
    Metric("*/top1", "%", "higher", "deterministic", "top-1 on a set of data.evals"),
    Metric("*/top5", "%", "higher", "deterministic", "top-5 on a set of data.evals"),
    Metric("*/loss", "nats", "lower", "deterministic", "mean cross-entropy on a set of data.evals"),
    Metric("*/ece", "", "lower", "deterministic", "calibration error on a set of data.evals"),
    Metric("*/precision", "", "higher", "deterministic",
           "share of a class's predictions that are correct, mean over the set's classes"),
    Metric("*/recall", "", "higher", "deterministic",
           "share of a class's examples that are predicted, mean over the set's classes"),
    Metric("*/f1", "", "higher", "deterministic",
           "harmonic mean of precision and recall of a class, mean over the set's classes"),
    Metric("*/knn", "%", "higher", "deterministic",
           "top-1 of k nearest neighbours in a label-free student's features"),
    Metric("*/linear", "%", "higher", "deterministic",
           "top-1 of least squares on all labelled examples of the set"),
    Metric("*/fewshot_*", "%", "higher", "deterministic",
           "top-1 of least squares on that number of examples per class, mean over seeds"),
    Metric("*/mce", "%", "lower", "deterministic",
           "mean corruption error on ImageNet-C, in percent of AlexNet's"),
    Metric("*/examples", "examples", "none", "deterministic", "examples counted in such a set"),
)  # fmt: skip

METRICS = MetricRegistry(*LEARNT, *LOOP)


def find_entry(metric: str) -> Metric | None:
    """Find the entry of a number as filters name it: `eval.top1` is `top1`."""
    kind, _, rest = metric.partition(".")
    return METRICS.find(rest if rest and kind in (TRAIN, EVAL, EPOCH, "test") else metric)


# Further keys for filters, sort and show. They are not the key `score`, which is the last
# evaluation's score in `run.json`, negated if lower is better.
SCORE, SCORE_NAME = "score.value", "score.name"
# The configuration key that selects a probe as the score of a label-free student.
SCORE_PROBE = "distill.score"
# Scores of the built-in tasks; the first one that a run has is its score.
SCORES = ("top1", "map", "distil_loss", "mse", "loss")


@dataclass(frozen=True)
class Score:
    """A number of a run's last evaluation, such as eval.top1."""

    name: str
    value: float


def select_score(values: Mapping[str, float], probe: JsonValue = "") -> Score | None:
    """Choose the score among a run's newest numbers; None before its first evaluation."""
    names = [f"{EVAL}.{name}" for name in SCORES]
    if isinstance(probe, str) and probe:
        names.insert(0, f"{EVAL}.{probe}")
    # Then numbers of custom tasks, in the catalogue's order.
    others = filter(is_candidate, (f"{EVAL}.{metric.name}" for metric in METRICS))
    name = next((name for name in itertools.chain(names, others) if name in values), None)
    return None if name is None else Score(name, values[name])


def is_candidate(name: str) -> bool:
    """Return whether a number may be a score: an evaluation's, for which a direction is better."""
    metric = METRICS.find(name.removeprefix(f"{EVAL}.")) if name.startswith(f"{EVAL}.") else None
    return metric is not None and metric.direction != "none"


def get_sign(name: str) -> float:
    """Return 1 if higher is better, else -1."""
    metric = METRICS.find(name.partition(".")[2])
    return -1.0 if metric is not None and metric.direction == "lower" else 1.0
