"""`trace`: a run's whole time as a file that Perfetto opens."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from store.query.record import RunRecord
from store.query.trace import Slice, Trace, make_trace
from store.terminal import print_json
from tools.runs.places import choose_records, warn_of_damage
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.storage.local import write_atomically

_NS, _US = 1_000_000_000, 1_000_000
# Any number: it says that all packets come from one writer.
_SEQUENCE = 1


def trace_run(options: argparse.Namespace) -> None:
    """Write the trace, read back, and say what it holds.

    Raises:
      UserError: no such run, nothing to draw, or a place that cannot be written.
    """
    records = choose_records(options, "trace", [options.run] if options.run else [])
    if options.run:
        told = [_trace(options, records[0], options.out)]
    else:
        suffix = ".json" if options.format == "chrome" else ".perfetto-trace"
        _make_folder(options.out)
        told = []
        for one in records:
            try:
                name = f"{one.path.replace('/', '--')}{suffix}"
                told.append(_trace(options, one, options.out / name))
            except UserError as error:
                print(f"left out: {error}", file=sys.stderr)
    if options.json:
        print_json(told[0] if options.run else {"traces": told})
        return
    for one in told:
        print(
            f"{one['out']}: {one['bytes']:,} bytes, {one['slices']:,} slices and "
            f"{one['points']:,} points on {one['tracks']} tracks"
        )


def _make_folder(path: Path) -> None:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"--out {str(path)!r} cannot be made: {error.strerror}; with --filter it is a directory"
        ) from error


def _trace(options: argparse.Namespace, record: RunRecord, out: Path) -> JsonObject:
    """Write a run's trace; gives what it holds."""
    warn_of_damage([record])
    trace = make_trace(record)
    if not trace.slices:
        raise UserError(
            f"{record.path} tells no time: it has no attempts.jsonl; its metrics stand in show RUN"
        )
    count, format_trace = _FORMATS[options.format]
    data = format_trace(trace)
    wanted = len(trace.slices), sum(len(one.points) for one in trace.counters)
    try:
        write_atomically(out, data)
        found = count(out.read_bytes())
    except OSError as error:
        raise UserError(
            f"--out {str(out)!r} cannot be written: {error.strerror or error}; give another place"
        ) from error
    if found != wanted:
        raise RuntimeError(f"{out} holds {found} slices and points instead of {wanted}")
    told: JsonObject = {"path": record.path, "out": str(out), "format": options.format}
    told |= {"bytes": len(data), "slices": wanted[0], "points": wanted[1]}
    return told | {"tracks": len({one.track for one in trace.slices}) + len(trace.counters)}


def format_perfetto(trace: Trace) -> bytes:
    """Perfetto's TrackEvent protobuf."""
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

    found: Any = protos.Trace()
    numbers: dict[tuple[str, ...], int] = {}

    def get_track(path: tuple[str, ...]) -> int:
        """The number of a track, which is described before it is used."""
        if path not in numbers:
            parent = get_track(path[:-1]) if path else 0
            numbers[path] = len(numbers) + 1
            track = found.packet.add().track_descriptor
            track.uuid, track.name = numbers[path], path[-1] if path else trace.name
            if path:
                track.parent_uuid = parent
            track.child_ordering = protos.TrackDescriptor.EXPLICIT
            track.sibling_order_rank = len(numbers)
        return numbers[path]

    def add_event(time: float, kind: int, track: int) -> Any:
        packet = found.packet.add()
        packet.timestamp, packet.trusted_packet_sequence_id = round(time * _NS), _SEQUENCE
        packet.track_event.type, packet.track_event.track_uuid = kind, track
        return packet.track_event

    for one in _order(trace.slices):
        track = get_track(one.track)
        event = add_event(one.began, protos.TrackEvent.TYPE_SLICE_BEGIN, track)
        event.name = one.name
        for name, value in one.facts.items():
            _annotate(event.debug_annotations.add(), name, value)
        add_event(one.ended, protos.TrackEvent.TYPE_SLICE_END, track)
    for counter in trace.counters:
        track = get_track(("counters", counter.name))
        described = found.packet[-1].track_descriptor
        described.counter.unit_name = counter.unit
        for time, value in counter.points:
            event = add_event(time, protos.TrackEvent.TYPE_COUNTER, track)
            event.double_counter_value = value
    return found.SerializeToString()


def _order(slices: list[Slice]) -> list[Slice]:
    """Tracks in the order in which they are drawn: the run, its attempts, their ranks."""
    return sorted(slices, key=lambda one: (one.track != ("run",), one.began))


def _annotate(target: Any, name: str, value: object) -> None:
    target.name = name
    if isinstance(value, int):
        target.int_value = value
    elif isinstance(value, float):
        target.double_value = value
    else:
        target.string_value = str(value)


def count_perfetto(data: bytes) -> tuple[int, int]:
    """Slices and points of counters in a trace's bytes."""
    from perfetto.protos.perfetto.trace import perfetto_trace_pb2 as protos

    found: Any = protos.Trace()
    found.ParseFromString(data)
    kinds = [one.track_event.type for one in found.packet if one.HasField("track_event")]
    slices = kinds.count(protos.TrackEvent.TYPE_SLICE_BEGIN)
    return slices, kinds.count(protos.TrackEvent.TYPE_COUNTER)


def format_chrome(trace: Trace) -> bytes:
    """The JSON of Chrome's trace viewer: a process each attempt, a thread each kind of span."""
    events: list[JsonObject] = []
    places: dict[tuple[str, ...], tuple[int, int]] = {}
    processes: dict[str, int] = {}
    for one in _order(trace.slices):
        if one.track not in places:
            process = processes.setdefault(one.track[0], len(processes) + 1)
            places[one.track] = process, len(places) + 1
            for kind, number, name in (
                ("process_name", 0, one.track[0]),
                ("thread_name", places[one.track][1], " ".join(one.track[1:]) or trace.name),
            ):
                events.append({"ph": "M", "name": kind, "pid": process, "tid": number,
                               "args": {"name": name}})  # fmt: skip
        process, thread = places[one.track]
        events.append({"ph": "X", "name": one.name, "pid": process, "tid": thread,
                       "ts": round(one.began * _US), "args": one.facts,
                       "dur": round((one.ended - one.began) * _US)})  # fmt: skip
    for counter in trace.counters:
        for time, value in counter.points:
            events.append({"ph": "C", "name": counter.name, "pid": 1, "ts": round(time * _US),
                           "args": {counter.unit or "value": value}})  # fmt: skip
    return json.dumps({"traceEvents": events}, separators=(",", ":")).encode()


def count_chrome(data: bytes) -> tuple[int, int]:
    """The same of JSON."""
    kinds = [event["ph"] for event in json.loads(data)["traceEvents"]]
    return kinds.count("X"), kinds.count("C")


_FORMATS = {
    "perfetto": (count_perfetto, format_perfetto),
    "chrome": (count_chrome, format_chrome),
}
