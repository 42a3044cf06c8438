"""Notes at a run's start who teaches it, and what was known of them then."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace

from job.spec import Job
from models.run_folder import find_run_folder
from models.teachers.teacher import SELVES, get_teacher_sections
from store.lineage.ancestors import CACHE, TEACHER, Ancestor, choose_taught, note_run, read_note
from utils.config.distill import TeacherSection
from utils.errors import UserError
from utils.log import get_logger
from utils.storage.places import is_remote, open_folder, to_path
from utils.weights.hub import is_shared
from utils.weights.opening import open_weights


def find_lineage(job: Job, judged: Sequence[Mapping[str, float]] = ()) -> list[Ancestor]:
    """All teachers of a run and theirs, the nearest generation first.

    A teacher that says nothing of its past is noted with what is known, and ends no run. A run's
    own average and its own past are no ancestors.

    Args:
      judged: metrics of the live teachers on the run's evaluation split, in their order.
    """
    distill = job.config.distill
    sections = get_teacher_sections(distill)
    # Whose stored answers are is the cache's to say: it may have been made elsewhere.
    if distill.teacher_cache and (known := read_note(open_folder(distill.teacher_cache))):
        return choose_taught(known, job.facts.teachers) if sections else known
    via = CACHE if distill.teacher_cache else TEACHER
    hashes = [*job.facts.teachers, *[""] * len(sections)]
    named = [(one, hashes[n]) for n, one in enumerate(sections) if one.model not in SELVES]
    scores = judged if len(judged) == len(named) else [{}] * len(named)
    found = []
    for (section, name), told in zip(named, scores, strict=True):
        own = Ancestor(1, via, name, section.weights or section.model, judged=dict(told))
        found += _describe(own, section)
    return sorted(found, key=lambda one: one.generation)


def _describe(own: Ancestor, section: TeacherSection) -> list[Ancestor]:
    if not section.weights or is_shared(section.weights):
        return [own]
    try:
        folder = find_run_folder(section.weights)
        if folder is not None:
            return note_run(own, folder)
        # What `tools.checkpoint export` writes says whose it is.
        name = open_weights(section.weights, "distill.teacher_weights").facts.get("run")
        known = replace(own, id=name) if isinstance(name, str) else own
        return [replace(known, weights=_hash_file(section.weights))]
    except (OSError, UserError) as error:
        get_logger().warning("the teacher %s tells nothing of its past: %s", own.place, error)
        return [own]


def _hash_file(place: str) -> str:
    """SHA-256 of a file of weights on this machine; of others it would have to be fetched twice."""
    if is_remote(place):
        return ""
    path = to_path(open_weights(place, "distill.teacher_weights").location)
    if not path.is_file():
        return ""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
