"""Events name runs and jobs, never points; slow readers, and streams that end."""

from __future__ import annotations

import asyncio

from service.jobs.files import JobQueue
from service.web.catalogue import RunCatalogue
from service.web.events import EventHub, JobEvent, Missed, RunEvent
from store.record.history import write_lines
from tests.service.web.apps import make_store
from tests.support.stored_runs import make_lines, make_run


async def read_some(hub: EventHub, change, count: int) -> list:
    """The first events after a change, with the watch at work."""
    watch = asyncio.create_task(hub.watch())
    found = []
    reader = hub.read()
    first = asyncio.ensure_future(anext(reader))
    # The first look is what is there already.
    while not hub._known_runs:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(change)
    async with asyncio.timeout(20):
        found.append(await first)
        while len(found) < count:
            found.append(await anext(reader))
    await reader.aclose()
    watch.cancel()
    return found


def test_a_progressing_run_is_announced_with_its_newest_step(tmp_path, monkeypatch):
    monkeypatch.setattr("service.web.catalogue._FRESH_S", 0.0)
    store = make_store(tmp_path)
    hub = EventHub(RunCatalogue(str(store)), JobQueue(store / "jobs", str(store)), every_s=0.01)

    def change() -> None:
        write_lines(store / "digits" / "killed", make_lines(9))
        make_run(store, "new", final={"eval_top1": 1.0})

    found = asyncio.run(read_some(hub, change, 2))
    assert all(isinstance(event, RunEvent) for event in found)
    assert {(event.run, event.step) for event in found} >= {("digits/killed", 9)}


def test_a_changed_job_is_announced(tmp_path, monkeypatch):
    monkeypatch.setattr("service.web.catalogue._FRESH_S", 0.0)
    store = make_store(tmp_path)
    queue = JobQueue(store / "jobs", str(store))
    hub = EventHub(RunCatalogue(str(store)), queue, every_s=0.01)
    from service.jobs.files import ROOT
    from service.jobs.submission import Submission

    submission = Submission(
        config=str(ROOT / "configs" / "smoke.yaml"), overrides={"run.run_id": "first"}
    )
    found = asyncio.run(read_some(hub, lambda: queue.submit(submission, "me"), 1))
    (event,) = found
    assert isinstance(event, JobEvent)
    assert (event.run, event.state) == ("smoke/first", "queued")


def test_the_store_is_polled_only_for_readers_and_slow_ones_are_notified(tmp_path):
    store = make_store(tmp_path)
    hub = EventHub(RunCatalogue(str(store)), JobQueue(store / "jobs", str(store)), every_s=0.01)

    async def play() -> None:
        watch = asyncio.create_task(hub.watch())
        await asyncio.sleep(0.1)
        assert hub._known_runs == {}
        reader = hub.read()
        waiting = asyncio.ensure_future(anext(reader))
        await asyncio.sleep(0)
        for step in range(200):
            hub._send(RunEvent(run="a/b", step=step, status="running"))
        found = [await waiting]
        while found[-1] != RunEvent(run="a/b", step=199, status="running"):
            found.append(await anext(reader))
        assert Missed() in found and len(found) < 80
        hub.close()
        async with asyncio.timeout(5):
            assert [event async for event in reader] == []
        watch.cancel()

    asyncio.run(play())
