"""How many images a second the host of a TPU VM can prepare, and how many chips that feeds.

    python -m tools.benchmark_input --stores --json input.json
    python -m tools.host_feed --input input.json --chip-images-per-s 2844
    python -m tools.host_feed --cpu-ms 1.3 --share 0.8 --hosts v5e-8 v6e-8

A model, no measurement of a host: images/s = vCPUs * share * 1000 / CPU ms an image. It takes a
vCPU of the host for as fast as the core that measured, and nothing else (network, disk, copies to
the chips) for a bound, so measure on the machine itself where there is one. What a chip takes comes
from a run, or as an estimate from `tools.compile_for_tpu`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from utils.errors import UserError
from utils.hosts import HOSTS
from utils.json_types import JsonValue, load_json
from utils.programs import CommandLine, create_program_parser, prepare_file
from utils.storage.json_files import write_json

# Modes of tools.benchmark_input that are this project's own input.
_OWN = ("pipeline", "store_jpeg", "store_uint8", "store_uint8_crop")


@dataclass(frozen=True)
class HostFeed:
    """What one host does with one form of input."""

    host: str
    images: str
    images_per_s: float  # of the whole host
    per_chip: float  # images/s for each of its chips
    # Chips that could be kept busy; None if the rate of a chip is not given
    chips_fed: float | None
    enough_ms: float | None  # CPU ms an image at which all its chips are fed; None as above


def create_parser() -> argparse.ArgumentParser:
    """Create the command line."""
    parser = create_program_parser(__doc__, prog="python -m tools.host_feed")
    cost = parser.add_mutually_exclusive_group(required=True)
    cost.add_argument("--input", type=Path, metavar="FILE", help="JSON of tools.benchmark_input")
    cost.add_argument("--cpu-ms", type=float, metavar="MS", help="CPU milliseconds an image")
    parser.add_argument(
        "--chip-images-per-s", type=float, metavar="RATE", help="images a second that a chip takes"
    )
    parser.add_argument(
        "--share", type=float, default=1.0, help="of the vCPUs that input may take (default 1)"
    )
    parser.add_argument("--hosts", nargs="+", metavar="HOST", help=f"of {', '.join(HOSTS)}")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    return parser


def run(options: argparse.Namespace) -> None:
    """Print the table, and write it to --json."""
    _check(options)
    costs = {"given": options.cpu_ms} if options.input is None else read_costs(options.input)
    names = options.hosts or list(HOSTS)
    rate = options.chip_images_per_s
    rows = [
        get_feed(name, form, cpu_ms / options.share, rate)
        for form, cpu_ms in costs.items()
        for name in names
    ]
    if options.json:
        prepare_file(options.json, "--json")
        write_json(options.json, [asdict(row) for row in rows])
    print("\n".join(format_table(rows, costs, rate)))


def _check(options: argparse.Namespace) -> None:
    for flag in ("cpu_ms", "chip_images_per_s"):
        value = getattr(options, flag)
        if value is not None and not 0 < value < float("inf"):
            raise UserError(f"--{flag.replace('_', '-')} ({value:g}) must be above 0; change it")
    if not 0 < options.share <= 1:
        raise UserError(f"--share ({options.share:g}) must be above 0 and at most 1; change it")
    for name in options.hosts or ():
        if name not in HOSTS:
            raise UserError(f"unknown --hosts {name!r}; use {', '.join(HOSTS)}")


def read_costs(path: Path) -> dict[str, float]:
    """CPU milliseconds an image of each form of input that tools.benchmark_input measured.

    Raises:
      UserError: the file is not there, or no result of that program.
    """
    begin = f"--input {path} cannot be read as a result of tools.benchmark_input"
    try:
        result = load_json(path.read_text(encoding="utf-8"))
    except OSError as error:
        reason = error.strerror or type(error).__name__
        raise UserError(f"{begin}: {reason}; write one with its --json") from error
    except ValueError as error:
        raise UserError(f"{begin}: it is no JSON ({error}); write one with its --json") from error
    modes = result.get("cpu_ms_per_image") if isinstance(result, dict) else None
    if not isinstance(modes, dict):
        raise UserError(f"{begin}: it holds no cpu_ms_per_image; write one with its --json")
    costs = {mode: _read_median(modes[mode]) for mode in _OWN if mode in modes}
    if not costs or not all(0 < value < float("inf") for value in costs.values()):
        raise UserError(
            f"{begin}: it has no median above 0 of each of its forms ({', '.join(_OWN)}); write it "
            "again with its --json"
        )
    return costs


def _read_median(mode: JsonValue) -> float:
    """Read the median of a form of input; NaN if it is missing."""
    median = mode.get("median") if isinstance(mode, dict) else None
    is_number = isinstance(median, int | float) and not isinstance(median, bool)
    return median if is_number else float("nan")


def get_feed(name: str, images: str, cpu_ms: float, chip_rate: float | None) -> HostFeed:
    """Compute what the host `name` prepares at `cpu_ms` of a vCPU an image.

    Args:
      chip_rate: images/s that a chip takes, if that is known.
    """
    host = HOSTS[name]
    whole = host.vcpus * 1000 / cpu_ms
    return HostFeed(
        host=name,
        images=images,
        images_per_s=whole,
        per_chip=whole / host.chips,
        chips_fed=whole / chip_rate if chip_rate else None,
        enough_ms=host.vcpus * 1000 / (host.chips * chip_rate) if chip_rate else None,
    )


def format_table(
    rows: Sequence[HostFeed], costs: Mapping[str, float], chip_rate: float | None
) -> list[str]:
    """Format the rows as lines."""
    taken = f"; a chip takes {chip_rate:,.0f} a second" if chip_rate else ""
    lines = ["images a second, by vCPUs and CPU time alone" + taken]
    header = f"{'host':6s} {'chips':>5s} {'vCPUs':>5s} {'host/s':>8s} {'a chip/s':>8s}"
    header += f" {'feeds':>6s} {'enough':>8s}" if chip_rate else ""
    for form, cpu_ms in costs.items():
        lines += [f"{form}: {cpu_ms:.2f} CPU ms an image", header]
        lines += [_format(row) for row in rows if row.images == form]
    return lines


def _format(row: HostFeed) -> str:
    host = HOSTS[row.host]
    line = f"{row.host:6s} {host.chips:5d} {host.vcpus:5d} "
    line += f"{row.images_per_s:8,.0f} {row.per_chip:8,.0f}"
    if row.chips_fed is None or row.enough_ms is None:
        return line
    short = "" if row.chips_fed >= host.chips else "  too few: chips would wait"
    return f"{line} {row.chips_fed:6.1f} {row.enough_ms:5.2f} ms{short}"


main = CommandLine(create_parser, run)

if __name__ == "__main__":
    raise SystemExit(main())
