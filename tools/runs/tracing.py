"""`trace`: a run's time line as a file that Perfetto opens."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from store.query.record import RunRecord
from store.query.trace import Slice, Trace, make_trace
from store.terminal import print_json
from tools.runs.find_runs import choose_records, warn_of_damage
from utils.errors import UserError
from utils.json_types import JsonObject
from utils.programs import prepare_folder, write_to
from utils.registry import load_object
from utils.storage.local import write_atomically

_NS, _US = 1_000_000_000, 1_000_000
_PROTOS = "perfetto.protos.perfetto.trace.perfetto_trace_pb2"
# Any number; all packets share it because they come from one writer.
_SEQUENCE = 1


def trace_run(options: argparse.Namespace) -> None:
    """Write the trace, read it back, and print its size."""
    records = choose_records(options, "trace", [options.run] if options.run else [])
    if options.run:
        traces = [_trace(options, records[0], options.out)]
    else:
        suffix = ".json" if options.format == "chrome" else ".perfetto-trace"
        prepare_folder(options.out, "--out")
        traces = []
        for record in records:
            try:
                path = options.out / f"{record.path.replace('/', '--')}{suffix}"
                traces.append(_trace(options, record, path))
            except UserError as error:
                print(f"left out: {error}", file=sys.stderr)
    if options.json:
        print_json(traces[0] if options.run else {"traces": traces})
        return
    for trace in traces:
        print(
            f"{trace['out']}: {trace['bytes']:,} bytes, {trace['slices']:,} slices and "
            f"{trace['points']:,} points on {trace['tracks']} tracks"
        )


def _trace(options: argparse.Namespace, record: RunRecord, out: Path) -> JsonObject:
    """Write a run's trace; return its sizes."""
    warn_of_damage([record])
    trace = make_trace(record)
    if not trace.slices:
        raise UserError(
            f"{record.path} has no times, as it has no attempts.jsonl; show RUN prints its metrics"
        )
    count, format_trace = _FORMATS[options.format]
    data = format_trace(trace)
    expected = len(trace.slices), sum(len(counter.points) for counter in trace.counters)
    with write_to(out, "--out"):
        write_atomically(out, data)
        counted = count(out.read_bytes())
    if counted != expected:
        raise RuntimeError(f"{out} holds {counted} slices and points instead of {expected}")
    tracks = len({item.track for item in trace.slices}) + len(trace.counters)
    sizes = {"bytes": len(data), "slices": counted[0], "points": counted[1], "tracks": tracks}
    return {"path": record.path, "out": str(out), "format": options.format, **sizes}


def format_perfetto(trace: Trace) -> bytes:
    """Format a trace as Perfetto's TrackEvent protobuf."""
    packets = load_object(f"{_PROTOS}:Trace")()
    event_types = load_object(f"{_PROTOS}:TrackEvent")
    explicit = load_object(f"{_PROTOS}:TrackDescriptor").EXPLICIT
    numbers: dict[tuple[str, ...], int] = {}

    def get_track(path: tuple[str, ...], **fields: object) -> int:
        """Return the number of a track, which is described before it is used."""
        if path not in numbers:
            parent = {"parent_uuid": get_track(path[:-1])} if path else {}
            number = numbers[path] = len(numbers) + 1
            head = {"uuid": number, "name": path[-1] if path else trace.name, **parent, **fields}
            order = {"child_ordering": explicit, "sibling_order_rank": number}
            packets.packet.add(track_descriptor={**head, **order})
        return numbers[path]

    def add_event(time: float, track: int, **fields: object) -> None:
        event = {"track_uuid": track, **fields}
        time_ns = round(time * _NS)
        packets.packet.add(
            timestamp=time_ns, trusted_packet_sequence_id=_SEQUENCE, track_event=event
        )

    for item in _sort(trace.slices):
        track = get_track(item.track)
        facts = [{"name": name, **_annotate(value)} for name, value in item.facts.items()]
        begin = {"type": event_types.TYPE_SLICE_BEGIN, "name": item.name}
        add_event(item.began, track, debug_annotations=facts, **begin)
        add_event(item.ended, track, type=event_types.TYPE_SLICE_END)
    for counter in trace.counters:
        track = get_track(("counters", counter.name), counter={"unit_name": counter.unit})
        for time, value in counter.points:
            add_event(time, track, type=event_types.TYPE_COUNTER, double_counter_value=value)
    return packets.SerializeToString()


def _sort(slices: list[Slice]) -> list[Slice]:
    """Sort slices by the order of drawing: the run, its attempts, their ranks."""
    return sorted(slices, key=lambda item: (item.track != ("run",), item.began))


def _annotate(value: object) -> dict[str, object]:
    if isinstance(value, int):
        return {"int_value": value}
    return {"double_value": value} if isinstance(value, float) else {"string_value": str(value)}


def count_perfetto(data: bytes) -> tuple[int, int]:
    """Count slices and points of counters in a trace's bytes."""
    trace = load_object(f"{_PROTOS}:Trace").FromString(data)
    event_types = load_object(f"{_PROTOS}:TrackEvent")
    types = [packet.track_event.type for packet in trace.packet if packet.HasField("track_event")]
    slices = types.count(event_types.TYPE_SLICE_BEGIN)
    return slices, types.count(event_types.TYPE_COUNTER)


def format_chrome(trace: Trace) -> bytes:
    """Format JSON of Chrome's trace viewer: a process each attempt, a thread each kind of span."""
    events: list[JsonObject] = []
    threads: dict[tuple[str, ...], tuple[int, int]] = {}
    processes: dict[str, int] = {}
    for item in _sort(trace.slices):
        if item.track not in threads:
            process = processes.setdefault(item.track[0], len(processes) + 1)
            threads[item.track] = process, len(threads) + 1
            thread_name = " ".join(item.track[1:]) or trace.name
            for kind, number, name in (
                ("process_name", 0, item.track[0]),
                ("thread_name", threads[item.track][1], thread_name),
            ):
                head = {"ph": "M", "name": kind, "pid": process, "tid": number}
                events.append({**head, "args": {"name": name}})
        process, thread = threads[item.track]
        head = {"ph": "X", "name": item.name, "pid": process, "tid": thread}
        times = {"ts": round(item.began * _US), "dur": round((item.ended - item.began) * _US)}
        events.append({**head, **times, "args": item.facts})
    for counter in trace.counters:
        head = {"ph": "C", "name": counter.name, "pid": 1}
        for time, value in counter.points:
            point = {"ts": round(time * _US), "args": {counter.unit or "value": value}}
            events.append({**head, **point})
    return json.dumps({"traceEvents": events}, separators=(",", ":")).encode()


def count_chrome(data: bytes) -> tuple[int, int]:
    """Count slices and points of counters in Chrome's JSON."""
    phases = [event["ph"] for event in json.loads(data)["traceEvents"]]
    return phases.count("X"), phases.count("C")


_FORMATS = {"perfetto": (count_perfetto, format_perfetto), "chrome": (count_chrome, format_chrome)}
