"""Collects the teachers of a run at its start, with their metrics at that time."""

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
    """Return all teachers of a run and theirs, the nearest generation first.

    A teacher without records is listed with what is known. The run's own average and last epoch are
    no ancestors. `judged` are metrics of the live teachers on the run's evaluation split.
    """
    distill = job.config.distill
    sections = get_teacher_sections(distill)
    # The cache records its own teachers: it may have been made elsewhere.
    if distill.teacher_cache and (known := read_note(open_folder(distill.teacher_cache))):
        return choose_taught(known, job.facts.teachers) if sections else known
    via = CACHE if distill.teacher_cache else TEACHER
    hashes = [*job.facts.teachers, *[""] * len(sections)]
    named = [(s, hashes[n]) for n, s in enumerate(sections) if s.model not in SELVES]
    scores = judged if len(judged) == len(named) else [{}] * len(named)
    ancestors: list[Ancestor] = []
    for (section, name), metrics in zip(named, scores, strict=True):
        own = Ancestor(1, via, name, section.weights or section.model, judged=dict(metrics))
        ancestors += _describe(own, section)
    return sorted(ancestors, key=lambda ancestor: ancestor.generation)


def _describe(own: Ancestor, section: TeacherSection) -> list[Ancestor]:
    if not section.weights or is_shared(section.weights):
        return [own]
    try:
        folder = find_run_folder(section.weights)
        if folder is not None:
            return note_run(own, folder)
        # `tools.checkpoint export` writes the id of the run.
        weights = open_weights(section.weights, "distill.teacher_weights")
        name = weights.facts.get("run")
        known = replace(own, id=name) if isinstance(name, str) else own
        # A remote file would be downloaded twice for its hash.
        path = None if is_remote(section.weights) else to_path(weights.location)
        if path is None or not path.is_file():
            return [known]
        with path.open("rb") as file:
            return [replace(known, weights=hashlib.file_digest(file, "sha256").hexdigest())]
    except (OSError, UserError) as error:
        get_logger().warning("the lineage of teacher %s cannot be read: %s", own.place, error)
        return [own]
