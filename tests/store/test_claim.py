"""The lock that two machines share: conditional writes and heartbeats instead of clocks."""

from __future__ import annotations

import json
import threading
import time
import uuid
from concurrent.futures import ThreadPoolExecutor

import pytest

from store.record.claim import CLAIM_FILE, Claim, describe_self
from tests.support.waiting import wait_for
from utils.errors import UserError
from utils.storage.places import open_folder


@pytest.fixture(params=["disk", "memory", "gs"])
def place(request, tmp_path) -> str:
    if request.param == "gs":
        return request.getfixturevalue("gs")
    return str(tmp_path) if request.param == "disk" else f"memory://{uuid.uuid4().hex}/a"


def write_owner(place: str, **changes: object) -> None:
    """A claim that another program left."""
    owner = {**describe_self(), "token": "other", "beat": 1, **changes}
    assert open_folder(place).write_claim(CLAIM_FILE, json.dumps(owner), None)


def test_exactly_one_of_many_concurrent_claims_succeeds(place):
    claims, got = [Claim(place) for _ in range(8)], []

    def take(claim: Claim) -> None:
        try:
            claim.acquire(wait_s=0.0)
            got.append(claim)
        except UserError as error:
            assert "is being written by process" in str(error)

    threads = [threading.Thread(target=take, args=(claim,)) for claim in claims]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 1
    got[0].release()
    after = Claim(place)
    after.acquire(wait_s=0.0)
    after.release()


def test_exclusive_writes_to_a_disk_succeed_once_each_time(tmp_path):
    folder, version = open_folder(str(tmp_path)), None
    for turn in range(20):
        with ThreadPoolExecutor(8) as pool:
            texts = [f"{turn} {number}" for number in range(8)]
            versions = list(
                pool.map(lambda text, seen=version: folder.write_claim("a", text, seen), texts)
            )
        (version,) = [found for found in versions if found is not None]
        assert folder.read_claim("a") == (texts[versions.index(version)], version)


def test_an_ended_owner_on_this_machine_blocks_no_one(place, caplog):
    caplog.set_level("INFO", logger="train")
    write_owner(place, started=1.0)  # this process began later: the number was given again
    claim = Claim(place)
    claim.acquire(wait_s=0.0)
    assert "took over the run from process" in caplog.text
    claim.release()


def test_a_silent_remote_owner_is_replaced_and_a_live_one_is_not(place):
    write_owner(place, machine="another", host="far")
    began = time.monotonic()
    claim = Claim(place, beat_s=0.02, patience_s=0.2)
    claim.acquire(wait_s=0.0)
    assert time.monotonic() - began >= 0.2
    claim.release()

    other = Claim(place, beat_s=0.05, patience_s=30.0)
    other.acquire(wait_s=0.0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("store.record.claim.is_of_this_machine", lambda owner: False)
        with pytest.raises(UserError, match="is being written by"):
            Claim(place, beat_s=0.05, patience_s=30.0).acquire(wait_s=0.1)
    other.release()


def test_an_owner_silent_for_too_long_learns_that_it_lost_the_run(place):
    first = Claim(place, beat_s=0.05)
    first.acquire(wait_s=0.0)
    folder = open_folder(place)
    # Another machine took it over while this one was suspended.
    taken = None
    while taken is None:
        _, version = folder.read_claim(CLAIM_FILE)
        taken = folder.write_claim(CLAIM_FILE, json.dumps({"token": "other"}), version)
    wait_for(lambda: first.lost)
    first.release()
    assert json.loads(folder.read_claim(CLAIM_FILE)[0]) == {"token": "other"}
