"""Stored teachers: answers to the very stream of examples that a training run sees.

A cache is a directory with `manifest.json` and, for each epoch and each process that wrote it, one
file of fixed-size rows in the order of the global batches, with a `.json` file beside it that
verifies it. A row has a column for each teacher: its k best classes, or its features (`rows`). The
last epoch may be stored in part.

A task whose teachers answer something that can be stored

- says in its facts what that is: `TaskFacts.answers`, an `AnswerForm` for each kind of answer;
- gives it in `RunTask.ask_to_store`, a tensor on the device for each column of the shape, in its
  order: `condense_answers(logits, column.top_k)`, or features [B, D] or [B, places, D];
- opens a run's cache by `open_cache` in `attach`, and checks it by the same in its check;
- adds `TeacherCache.read(step, batch.indices)` to the batch's draws, and has `stream_epochs`;
- asks in its loss for `get_stored_answers(batch)`, a `SparseTeacher` for each column of classes, or
  for `get_stored_features(batch)`, float32 tensors, each in the order of the run's teachers.
"""

from tasks.teacher_cache.by_example import BY_EXAMPLE, describe_images, find_views, is_by_example
from tasks.teacher_cache.manifest import (
    FORMAT_VERSION,
    MANIFEST,
    count_stored,
    describe_classes,
    get_file_name,
    read_further,
    read_manifest,
    read_shape,
    write_manifest,
)
from tasks.teacher_cache.reader import (
    INDICES,
    LOG_PROBS,
    RESIDUAL,
    STORED_FEATURES,
    TeacherCache,
    combine_stored,
    get_stored_answers,
    get_stored_features,
    open_cache,
)
from tasks.teacher_cache.rows import (
    CLASSES,
    DTYPES,
    FEATURES,
    AnswerForm,
    CacheShape,
    Column,
    compute_marks,
    condense_answers,
    measure_errors,
    pack_answers,
    pack_rows,
    unpack_values,
)
from tasks.teacher_cache.writer import CacheWriter, read_facts

__all__ = [
    "BY_EXAMPLE",
    "CLASSES",
    "DTYPES",
    "FEATURES",
    "FORMAT_VERSION",
    "INDICES",
    "LOG_PROBS",
    "MANIFEST",
    "RESIDUAL",
    "STORED_FEATURES",
    "AnswerForm",
    "CacheShape",
    "CacheWriter",
    "Column",
    "TeacherCache",
    "combine_stored",
    "compute_marks",
    "condense_answers",
    "count_stored",
    "describe_classes",
    "describe_images",
    "find_views",
    "get_file_name",
    "get_stored_answers",
    "get_stored_features",
    "is_by_example",
    "measure_errors",
    "open_cache",
    "pack_answers",
    "pack_rows",
    "read_facts",
    "read_further",
    "read_manifest",
    "read_shape",
    "unpack_values",
    "write_manifest",
]
