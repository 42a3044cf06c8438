"""Stored teachers: outputs for the very stream of examples that a training run sees.

A cache is a directory with `manifest.json` and, for each epoch and each process that wrote it, one
file of fixed-size rows in the order of the global batches, with a `.json` file beside it that
verifies it. A row has a column for each teacher: its k best classes, or its features (`rows`). The
last epoch may be stored in part.

A task whose teachers' outputs can be stored

- declares them in its facts: `TaskFacts.answers`, an `AnswerForm` for each kind of output;
- returns them from `Caches.compute_cached_outputs`, a tensor on the device for each column of the
  shape, in its order: `condense_answers(logits, column.top_k)`, or features [B, D] or
  [B, places, D];
- opens a run's cache by `open_cache` in `attach`, and checks it by the same in its check;
- adds `TeacherCache.read(step, batch.indices)` to the batch's draws, and has `stream_epochs`;
- calls in its loss `get_stored_answers(batch)`, a `SparseTeacher` for each column of classes, or
  `get_stored_features(batch)`, float32 tensors, each in the order of the run's teachers.
"""

# How numbers may be stored.
DTYPES = ("float16", "bfloat16", "int8")
