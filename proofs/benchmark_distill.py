"""What a stored teacher costs: step time and FLOPs beside a live teacher and none, in one run.

Builds the engine's own step three times (student only, stored answers, live teacher) on synthetic
input, runs them in turn and prints medians, ratios and FLOPs of the compiled graphs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING
from unittest import mock

from bill.hlo import count_dot_flops
from bill.step.derive import describe_stream_of_one
from engine import run_steps
from job.build import build_parts
from job.check import check
from job.stream import iterate_batches
from proofs.timed_run import measure_in_turns
from store.record.environment import read_environment
from tasks.classify.synthetic import create_random_teacher, name_examples, write_random_answers
from tasks.teachers.cache.rows import CLASSES, CacheShape, Column
from utils.config.devices import DEVICES
from utils.config.distill import TeacherSection
from utils.config.load import load_config
from utils.json_types import JsonObject
from utils.programs import CommandLine, ProgramParser
from utils.runtime.launcher import create_runtime
from utils.storage.json_files import write_json

if TYPE_CHECKING:
    from utils.config.load import RunConfig
    from utils.runtime.base import Runtime

_STEPS_PER_EPOCH = 64
_CHANNELS = 3


def create_parser() -> argparse.ArgumentParser:
    """Create the command line."""
    parser = ProgramParser(
        prog="python -m proofs.benchmark_distill", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--device", choices=tuple(DEVICES), default="cpu")
    parser.add_argument("--student", default="vit_tiny_patch16_224")
    parser.add_argument("--teacher", default="vit_small_patch16_224")
    parser.add_argument("--image-size", type=int, default=96)
    parser.add_argument("--batch", type=int, default=32, help="examples of a step")
    parser.add_argument("--classes", type=int, default=1000)
    parser.add_argument("--top-k", type=int, default=16)
    parser.add_argument("--teachers", type=int, default=1, metavar="N", help="equal ones")
    parser.add_argument("--no-live", action="store_true", help="leave out the teachers in the step")
    parser.add_argument("--steps", type=int, default=5, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of each kind, in turn")
    parser.add_argument("--json", type=Path, help="write the figures here")
    return parser


def run(options: argparse.Namespace) -> None:
    """Measure, print, and write the figures to --json."""
    report = measure(options)
    print_report(report)
    if options.json:
        write_json(options.json, report)


def measure(options: argparse.Namespace) -> JsonObject:
    """Measure all figures of one run."""
    with tempfile.TemporaryDirectory() as folder:
        plain = create_config(options, folder, "plain")
        runtime = create_runtime(plain.runtime)
        live, target = create_config(options, folder, "live"), Path(folder) / "cache"
        write_random_answers(
            live, options.top_k, target, steps=_STEPS_PER_EPOCH, describe=describe_stream_of_one
        )
        kinds = {
            kind: StepRunner(runtime, create_config(options, folder, kind))
            for kind in _list_kinds(options)
        }
        report: JsonObject = {"kinds": {}, "ratios": {}}
        for kind, runner in kinds.items():
            runner.run(2)
            report["kinds"][kind] = {"flops": runner.count_flops()}
        cases = {kind: partial(runner.run, options.steps) for kind, runner in kinds.items()}
        times = measure_in_turns(cases, options.rounds)
        for runner in kinds.values():
            runner.close()
    for kind, values in times.items():
        report["kinds"][kind]["step_s"] = statistics.median(values) / options.steps
    for kind in _list_kinds(options)[1:]:
        pairs = zip(times[kind], times["plain"], strict=True)
        flops = report["kinds"][kind]["flops"], report["kinds"]["plain"]["flops"]
        report["ratios"][kind] = {
            "time": statistics.median(a / b for a, b in pairs),
            "flops": flops[0] / flops[1] if flops[1] else None,
        }
    report["storage"] = describe_storage(options)
    settings = {key: str(value) for key, value in vars(options).items()}
    return {**report, "settings": settings, "environment": read_environment()}


def _list_kinds(options: argparse.Namespace) -> tuple[str, ...]:
    """List the kinds of step, the one without a teacher first."""
    return ("plain", "stored") if options.no_live else ("plain", "stored", "live")


def create_config(options: argparse.Namespace, folder: str, kind: str) -> RunConfig:
    """Create the run of one kind; the three differ in their teacher alone."""
    size = options.image_size
    examples = options.batch * _STEPS_PER_EPOCH
    name = name_examples(size, _CHANNELS, options.classes, examples)
    flags = [
        "--data.source=synthetic",
        f"--data.name={name}",
        "--data.train_pp=value_range(-1, 1)",
        "--data.eval_pp=value_range(-1, 1)",
        f"--batch_size={options.batch}",
        "--mixup=0.8",
        f"--model={options.student}",
        f"--model.image_size={size}",
        "--train.steps=1000000",
        f"--model.num_classes={options.classes}",
        f"--runtime.device={options.device}",
        f"--run.output_dir={folder}",
        "--distill.allow_weak_teacher",
    ]
    if kind != "plain":
        teachers = []
        for number in range(options.teachers):
            target = Path(folder) / f"teacher{number}"
            section = TeacherSection(model=options.teacher, args={"img_size": size})
            if not target.is_dir():
                create_random_teacher(section, target, classes=options.classes)
            # The same weights: what tells them apart is the scale of their pixels.
            own = {"mean": [127.5 + number] * 3, "std": [127.5] * 3}
            teachers.append({**section.model_dump(), "weights": str(target), **own})
        flags += [f"--distill.teachers={json.dumps(teachers)}", "--distill.loss=kd"]
    if kind == "stored":
        flags += [f"--distill.teacher_cache={folder}/cache", "--distill.cache_end=cycle"]
    return load_config(flags)


class StepRunner:
    """The engine's steps of one configuration, fed by the run's own input."""

    def __init__(self, runtime: Runtime, config: RunConfig) -> None:
        self.runtime = runtime
        self.parts = parts = build_parts(runtime, check(config))
        self._steps = run_steps(
            parts.state, iterate_batches(parts, 0), parts.task, runtime, parts.plan
        )

    def run(self, steps: int) -> float:
        """Seconds of some steps, the device waited for."""
        began = time.perf_counter()
        result = next(itertools.islice(self._steps, steps - 1, None))
        assert result.values is not None
        self.runtime.fetch(result.values)
        return time.perf_counter() - began

    def count_flops(self) -> float:
        """FLOPs of matrix products in the next step: of XLA's graph, or as PyTorch counts them."""
        if self.runtime.name == "xla":
            return count_dot_flops(self._read_graph())
        from torch.utils.flop_counter import FlopCounterMode

        with FlopCounterMode(display=False) as counter:
            next(self._steps)
        return float(counter.get_total_flops())

    def close(self) -> None:
        """End the input."""
        self._steps.close()
        self.parts.close()

    def _read_graph(self) -> str:
        """HLO of the engine's next step, as it stands where the step is dispatched."""
        import torch_xla

        texts: list[str] = []
        finish = self.runtime.finish_step
        weights = list(self.parts.state.model.parameters())

        def read_and_finish() -> None:
            texts.append(torch_xla._XLAC._get_xla_tensors_hlo(weights))
            finish()

        # torch_xla shows a graph only while it is pending.
        with mock.patch.object(self.runtime, "finish_step", read_and_finish):
            next(self._steps)
        (text,) = texts
        return text


def describe_storage(options: argparse.Namespace) -> dict[str, float]:
    """Bytes of an example-epoch, and the least that k values, k classes and a rest can take."""
    column = Column("", CLASSES, options.classes, options.top_k)
    shape = CacheShape((column,) * options.teachers, 1, 1, 1)
    minimum = options.top_k * (2 + math.ceil(math.log2(options.classes) / 8)) + 2
    return {"bytes": shape.row_dtype.itemsize, "minimum": options.teachers * minimum}


def print_report(report: JsonObject) -> None:
    """Print the figures as a table."""
    print(f"{'step':<16}{'ms':>10}{'GFLOP':>10}{'time ratio':>12}{'FLOP ratio':>12}")
    for kind, facts in report["kinds"].items():
        ratio = report["ratios"].get(kind, {"time": 1.0, "flops": 1.0})
        print(
            f"{kind:<16}{1e3 * facts['step_s']:>10.1f}{facts['flops'] / 1e9:>10.2f}"
            f"{ratio['time']:>12.3f}{ratio['flops']:>12.4f}"
        )
    storage = report["storage"]
    print(
        f"storage: {storage['bytes']} bytes an example-epoch, arithmetic minimum "
        f"{storage['minimum']}"
    )


main = CommandLine(create_parser, run)

if __name__ == "__main__":
    sys.exit(main())
