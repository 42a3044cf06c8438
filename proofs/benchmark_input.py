"""Images per second and core: this pipeline, timm's loader, and JPEG decoding alone.

    python -m tools.benchmark_input --json input.json
    python -m tools.benchmark_input --images /data/some/jpegs --rounds 5

All read the same JPEGs (made here, ImageNet-like, where none are given), on the same one core and
in turns:

  pipeline   datasets.create_loader on a TFRecord dataset of the files: crop, flip, uint8 batch
  timm       timm.data.create_loader as it comes: colour jitter, one worker, float32 batch
  timm_lean  the same with the pipeline's crop and flip alone, no worker, up to the uint8 batch
  decode     tf.image.decode_and_crop_jpeg alone, on bytes in memory, boxes drawn beforehand

`--stores` adds what `tools.prepare_dataset resize --short-side 256` makes of the files:

  store_jpeg        the pipeline's string on JPEGs of 256 pixels
  store_uint8       on pixels: nothing is decoded, the crop is resized
  store_uint8_crop  on pixels, a random crop of the batch's size, which nothing has to resize
  pipeline_scaled, pipeline_rrc  the files, by the ops that shrink in decoding and that smooth

What counts is CPU time per image (user and system, all threads and workers); the rounds' medians
are compared. `--startup` also measures the first batch, a resume in mid-epoch and memory.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from big_vision.tensorflow_setup import import_tensorflow
from bill.plan_feed import create_jpeg
from datasets import Position, create_loader
from proofs.timed_run import measure_in_turns
from utils.config.data import DataSection
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.programs import CommandLine, create_program_parser, prepare_file, require_at_least
from utils.storage.json_files import write_json

if TYPE_CHECKING:
    from types import ModuleType

    from timm.data.loader import PrefetchLoader

    from datasets import Loader

MODES = ("pipeline", "timm", "timm_lean", "decode")
_CROP = "decode_jpeg_and_inception_crop({size})"
_CROPS = {
    "store_jpeg": ("jpegs_256", _CROP),
    "store_uint8": ("jpegs_256_uint8", "inception_crop({size})"),
    "store_uint8_crop": ("jpegs_256_uint8", "random_crop({size})"),
    "pipeline_scaled": ("jpegs", "decode_jpeg_scaled_and_inception_crop({size})"),
    "pipeline_rrc": ("jpegs", "random_resized_crop({size})"),
}
STORES = tuple(_CROPS)
# What the project promises, as ratios of CPU time per image.
MIN_OVER_TIMM = 2.5
MIN_OF_DECODE = 0.55
MIN_OVER_STORE = {"store_jpeg": 3.0, "store_uint8": 10.0}
_RATIOS = {
    "pipeline_over_timm": "timm's",
    "pipeline_over_timm_lean": "timm_lean's",
    "pipeline_of_decode": "decode's",
}
_SPLIT = "train"
_Order = Literal["auto", "exact", "sharded"]


def run(arguments: argparse.Namespace) -> int | None:
    """Measure all modes, print, and write the figures to --json."""
    if arguments.child:
        return _serve(arguments)
    _check(arguments)
    with tempfile.TemporaryDirectory() as work:
        print_result(result := run_benchmark(arguments, Path(work)))
    if arguments.json:
        write_json(arguments.json, result)
    return None


def _check(arguments: argparse.Namespace) -> None:
    counts = ("num_images", "startup_records") if arguments.startup else ("num_images",)
    require_at_least(1, arguments, *counts, "size", "batch", "rounds")
    for name in counts:
        if (count := getattr(arguments, name)) < arguments.batch:
            raise UserError(
                f"--{name.replace('_', '-')} ({count}) must fill a batch of --batch "
                f"({arguments.batch}); raise it, or lower --batch"
            )
    prepare_file(arguments.json, "--json")


def create_parser() -> argparse.ArgumentParser:
    """Create the command line."""
    parser = create_program_parser(__doc__, prog="python -m tools.benchmark_input")
    parser.add_argument("--images", default="", help="folder of JPEGs, searched deeply")
    parser.add_argument("--num-images", type=int, default=1024, help="images to use (default 1024)")
    parser.add_argument("--size", type=int, default=224, help="side of the crops (default 224)")
    parser.add_argument("--batch", type=int, default=128, help="images of a batch (default 128)")
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default 5)")
    parser.add_argument(
        "--stores", action="store_true", help="also: stored at 256 pixels, and other crops"
    )
    parser.add_argument(
        "--startup",
        action="store_true",
        help="also: first batch, resume and memory over --startup-records records (5.5 GB of disk)",
    )
    parser.add_argument("--startup-records", type=int, default=50_000, help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--child", default="", help=argparse.SUPPRESS)
    parser.add_argument("--work", default="", help=argparse.SUPPRESS)
    return parser


def run_benchmark(arguments: argparse.Namespace, work: Path) -> JsonObject:
    """Prepare files, measure the modes in turns, and give medians and ratios."""
    folder = work / "folder" / _SPLIT / "jpeg"
    folder.mkdir(parents=True)
    mean_bytes = _collect_jpegs(arguments, folder)
    _prepare(work, folder)
    if arguments.stores:
        _prepare_stores(work)
    rounds = _measure_in_turns(arguments, work)
    modes = {mode: summarise(measured) for mode, measured in rounds.items()}
    cpu = {mode: values["median"] for mode, values in modes.items()}
    result: JsonObject = {
        "machine": {"cpu": _get_cpu_name(), "cores": len(os.sched_getaffinity(0))},
        "images": {"count": arguments.num_images, "mean_kb": round(mean_bytes / 1000, 1)},
        "size": arguments.size,
        "rounds": arguments.rounds,
        "cpu_ms_per_image": modes,
        "pipeline_over_timm": cpu["timm"] / cpu["pipeline"],
        "pipeline_over_timm_lean": cpu["timm_lean"] / cpu["pipeline"],
        "pipeline_of_decode": cpu["decode"] / cpu["pipeline"],
        "required": {"pipeline_over_timm": MIN_OVER_TIMM, "pipeline_of_decode": MIN_OF_DECODE},
    }
    for store in STORES if arguments.stores else ():
        result[f"pipeline_over_{store}"] = cpu["pipeline"] / cpu[store]
        if store in MIN_OVER_STORE:
            result["required"][f"pipeline_over_{store}"] = MIN_OVER_STORE[store]
    if arguments.startup:
        result["startup"] = _measure_startup(arguments, work, folder)
    return result


def summarise(cpu_ms: Sequence[float]) -> dict[str, float]:
    """Minimum, median and maximum of CPU milliseconds per image, and the median's images/s."""
    median = statistics.median(cpu_ms)
    return {
        "min": min(cpu_ms),
        "median": median,
        "max": max(cpu_ms),
        "images_per_core_s": 1e3 / median,
    }


def print_result(result: JsonObject) -> None:
    """Print the result as a table."""
    machine, images = result["machine"], result["images"]
    print(
        f"{machine['cpu']}, one core; {images['count']} JPEGs of {images['mean_kb']} kB, "
        f"{result['size']} px, {result['rounds']} rounds"
    )
    print(f"{'':10s} {'CPU ms/image (min median max)':>32s} {'images/core/s':>14s}")
    for mode, cpu in result["cpu_ms_per_image"].items():
        numbers = f"{cpu['min']:.3f} {cpu['median']:.3f} {cpu['max']:.3f}"
        print(f"{mode:10s} {numbers:>32s} {cpu['images_per_core_s']:14.0f}")
    for key, name in _RATIOS.items():
        print(f"{name} CPU time / pipeline's: {_show_ratio(result, key)}")
    for store in STORES:
        if (key := f"pipeline_over_{store}") in result:
            print(f"pipeline's CPU time / {store}'s: {_show_ratio(result, key)}")
    if result["required"]:
        print("  in brackets: what this project sets itself on an idle machine; no fault of yours")
    for name, values in result.get("startup", {}).items():
        print(f"{name}: " + ", ".join(f"{key} {value:.2f}" for key, value in values.items()))


def _show_ratio(result: JsonObject, key: str) -> str:
    required = result["required"].get(key)
    if required is None:
        return f"{result[key]:.2f}"
    verdict = "reached" if result[key] >= required else "MISSED"
    return f"{result[key]:.2f} (at least {required}: {verdict})"


def _collect_jpegs(arguments: argparse.Namespace, folder: Path) -> float:
    """Fill the folder with JPEGs; their mean size in bytes."""
    from tqdm import tqdm

    paths: list[Path] = []
    if arguments.images:
        files = sorted(Path(arguments.images).rglob("*"))
        paths = [p for p in files if p.suffix.lower() in {".jpg", ".jpeg"}]
        if not paths:
            raise UserError(f"--images ({arguments.images}) holds no .jpg or .jpeg; name a folder")
    total = 0
    for number in tqdm(range(arguments.num_images), desc="JPEGs", disable=None):
        data = paths[number % len(paths)].read_bytes() if paths else create_jpeg(number)
        (folder / f"{number:06d}.jpg").write_bytes(data)
        total += len(data)
    return total / arguments.num_images


def _prepare(work: Path, folder: Path) -> None:
    """Write the same files as a TFDS dataset, in a process of its own."""
    source = str(folder.parents[1])
    flags = ("--out", str(work / "tfds"), "--name", "jpegs")
    _run_child("tools.prepare_dataset", "folder", source, *flags)


def _prepare_stores(work: Path) -> None:
    """Write the dataset at 256 pixels, as JPEGs and as uint8 pixels."""
    for form in ("jpeg", "uint8"):
        flags = ("--root", str(work / "tfds"), "--short-side", "256", "--format", form)
        _run_child("tools.prepare_dataset", "resize", "jpegs", *flags)


def _run_child(*words: str, **variables: str) -> str:
    program = [sys.executable, "-m", *words]
    result = subprocess.run(program, capture_output=True, text=True, env=os.environ | variables)
    if result.returncode:
        raise RuntimeError(f"{words[0]} failed:\n{result.stderr[-4000:]}")
    return result.stdout


def _measure_in_turns(arguments: argparse.Namespace, work: Path) -> dict[str, list[float]]:
    """Start a process for each mode; each runs its round while the others wait."""
    modes = MODES + (STORES if arguments.stores else ())
    children = {mode: _start_child(arguments, work, mode) for mode in modes}
    try:
        cases = {mode: partial(_ask, mode, child) for mode, child in children.items()}
        return measure_in_turns(cases, arguments.rounds, warm_up=1)
    finally:
        for child in children.values():
            child.kill()
            child.wait()


def _ask(mode: str, child: subprocess.Popen[str]) -> float:
    """CPU milliseconds per image in one round of a child."""
    assert child.stdin and child.stdout and child.stderr
    try:
        child.stdin.write("go\n")
        child.stdin.flush()
        return json.loads(child.stdout.readline())
    except (BrokenPipeError, ValueError) as error:
        log = child.stderr.read()[-4000:]
        raise RuntimeError(f"the process of {mode} died:\n{log}") from error


def _start_child(arguments: argparse.Namespace, work: Path, mode: str) -> subprocess.Popen[str]:
    program = [sys.executable, "-m", "tools.benchmark_input", "--child", mode]
    program += ["--work", str(work), "--num-images", str(arguments.num_images)]
    program += ["--size", str(arguments.size), "--batch", str(arguments.batch)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = os.environ | {"XDG_CACHE_HOME": str(work / "cache"), "TF_CPP_MIN_LOG_LEVEL": "3"}
    return subprocess.Popen(program, text=True, env=environment, **pipes)


def _serve(arguments: argparse.Namespace) -> int:
    """Serve one mode: measure a round for every line that comes in."""
    if arguments.child.startswith("startup"):
        print(json.dumps(_STARTUP[arguments.child](arguments)))
        return 0
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    import torch

    torch.set_num_threads(1)
    run_round = _CHILDREN[arguments.child](arguments)
    cpu = _get_cpu_s()
    for _ in sys.stdin:
        images = run_round()
        # Batches that are prepared while the others run count in the next round.
        now = _get_cpu_s()
        print(json.dumps(1e3 * (now - cpu) / images), flush=True)
        cpu = now
    return 0


def _get_cpu_s() -> float:
    """CPU seconds of this process and its living workers."""
    total = time.process_time()
    for worker in multiprocessing.active_children():
        fields = Path(f"/proc/{worker.pid}/stat").read_text().rsplit(")", 1)[1].split()
        total += (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return total


def _create_pipeline(
    arguments: argparse.Namespace, name: str = "jpegs", crop: str = _CROP
) -> Callable[[], int]:
    """Rounds over the project's loader; it runs on across them."""
    loader = _create_loader(arguments, name, crop)
    batches = iter(loader.batches())

    def run_round() -> int:
        images = 0
        for _ in range(loader.batches_per_epoch):
            images += len(next(batches))
        return images

    return run_round


def _create_loader(
    arguments: argparse.Namespace, name: str, crop: str, order: _Order = "auto"
) -> Loader:
    section = DataSection(
        name=name,
        root=str(Path(arguments.work) / "tfds"),
        train_pp=f"{crop.format(size=arguments.size)}|flip_lr|value_range(-1, 1)",
        global_batch_size=arguments.batch,
        prefetch_batches=1,
        order=order,
    )
    return create_loader(section, "train", seed=0)


def _create_timm(arguments: argparse.Namespace) -> Callable[[], int]:
    """Rounds over timm's loader as it comes, up to the float32 batch that it hands over."""
    loader = _create_timm_loader(arguments, {})
    return lambda: sum(len(images) for images, _ in loader)


def _create_timm_lean(arguments: argparse.Namespace) -> Callable[[], int]:
    """Rounds over timm's loader with the pipeline's crop and flip alone, up to its uint8 batch."""
    same = {"color_jitter": 0.0, "scale": (0.05, 1.0), "ratio": (0.75, 1.33)}
    in_process = {"num_workers": 0, "persistent_workers": False}
    # What its prefetcher wraps: batches before they are normalised.
    batches = _create_timm_loader(arguments, {**same, **in_process}).loader
    return lambda: sum(len(images) for images, _ in batches)


def _create_timm_loader(arguments: argparse.Namespace, options: JsonObject) -> PrefetchLoader:
    import torch
    from timm.data import create_dataset, create_loader
    from timm.data.loader import PrefetchLoader

    loader = create_loader(
        create_dataset("", root=str(Path(arguments.work) / "folder" / _SPLIT)),
        input_size=(3, arguments.size, arguments.size),
        batch_size=arguments.batch,
        is_training=True,
        pin_memory=False,
        device=torch.device("cpu"),
        **options,
    )
    assert isinstance(loader, PrefetchLoader)  # timm's default
    return loader


def _create_decode(arguments: argparse.Namespace) -> Callable[[], int]:
    """Rounds of nothing but tf.image.decode_and_crop_jpeg."""
    tf = import_tensorflow()
    tf.config.threading.set_intra_op_parallelism_threads(1)
    tf.config.threading.set_inter_op_parallelism_threads(1)
    jobs = list(_draw_windows(tf, Path(arguments.work) / "folder" / _SPLIT / "jpeg"))

    def run_round() -> int:
        for data, window in jobs:
            tf.image.decode_and_crop_jpeg(data, window, channels=3)
        return len(jobs)

    return run_round


def _draw_windows(tf: ModuleType, folder: Path) -> Iterator[tuple[Any, Any]]:
    """Encoded images and boxes as the pipeline's crop draws them."""
    for number, path in enumerate(sorted(folder.iterdir())):
        data = tf.constant(path.read_bytes())
        begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
            tf.io.extract_jpeg_shape(data),
            tf.zeros([1, 0, 4]),
            seed=[0, number],
            min_object_covered=0,
            area_range=(0.05, 1.0),
            aspect_ratio_range=(0.75, 1.33),
            use_image_if_no_bounding_boxes=True,
        )
        yield data, tf.concat([begin[:2], size[:2]], axis=0)


def _measure_startup(arguments: argparse.Namespace, work: Path, folder: Path) -> JsonObject:
    """First batch, resume and memory on many records, each order in a process of its own."""
    many = work / "many" / _SPLIT / "jpeg"
    many.mkdir(parents=True)
    files = sorted(folder.iterdir())
    for number in range(arguments.startup_records):
        os.link(files[number % len(files)], many / f"{number:06d}.jpg")
    flags = ("--out", str(work / "tfds"), "--name", "many")
    _run_child("tools.prepare_dataset", "folder", str(work / "many"), *flags)
    # Written data must not be flushed while reading is measured.
    os.sync()
    results = {}
    for name in _STARTUP:
        words = ["tools.benchmark_input", "--child", name, "--work", str(work)]
        words += ["--size", str(arguments.size), "--batch", str(arguments.batch)]
        words += ["--startup-records", str(arguments.startup_records)]
        output = _run_child(*words, XDG_CACHE_HOME=str(work / "cache"))
        results[name.removeprefix("startup_")] = json.loads(output.splitlines()[-1])
    return results


def _start_order(arguments: argparse.Namespace, order: _Order) -> dict[str, float]:
    import_tensorflow()
    import tensorflow_datasets  # noqa: F401  imports are not what is measured

    def get_first(position: Position) -> float:
        start = time.perf_counter()
        loader = _create_loader(arguments, "many", _CROP, order=order)
        next(loader.batches(position))
        return time.perf_counter() - start

    before = _get_peak_gib()
    with_index = get_first(Position())
    first = get_first(Position())
    middle = Position(0, arguments.startup_records // arguments.batch // 2 * arguments.batch)
    return {
        "first_batch_and_index_s": with_index,
        "first_batch_s": first,
        "resume_s": get_first(middle),
        "memory_gib": _get_peak_gib() - before,
    }


def _get_peak_gib() -> float:
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (1 << 20)


def _get_cpu_name() -> str:
    lines = Path("/proc/cpuinfo")
    if lines.exists():
        for line in lines.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


_CHILDREN = {
    "pipeline": _create_pipeline,
    "timm": _create_timm,
    "timm_lean": _create_timm_lean,
    "decode": _create_decode,
    **{mode: partial(_create_pipeline, name=n, crop=c) for mode, (n, c) in _CROPS.items()},
}
_STARTUP = {
    "startup_exact": partial(_start_order, order="exact"),
    "startup_sharded": partial(_start_order, order="sharded"),
}
main = CommandLine(create_parser, run)

if __name__ == "__main__":
    sys.exit(main())
