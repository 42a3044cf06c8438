"""Checks of what a run reads and writes: the dataset's first record and the run store."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

from tools.doctor.machine import GREEN, RED, ROOT, YELLOW, Finding, Machine

_ADC = ".config/gcloud/application_default_credentials.json"
_RECORD = "tools.doctor.first_record"


def check_output(machine: Machine) -> Finding:
    """A file can be written to the run store, read back and removed."""
    output = machine.requirements.output
    text = uuid.uuid4().hex
    try:
        if "://" in output:
            place = output
            _try_url(f"{output.rstrip('/')}/doctor-{text}", text)
        else:
            place = _try_directory(ROOT / output, text)
    except ImportError as error:
        hint = "pip install gcsfs" if output.startswith("gs://") else "pip install fsspec"
        return Finding("output", RED, f"{output}: {error}", hint)
    except Exception as error:  # every storage has errors of its own
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        hint = (
            "see 'credentials'" if "://" in output else f"another --output, or chmod u+w {output}"
        )
        return Finding("output", RED, f"{output} cannot be written: {reason}", hint)
    return Finding("output", GREEN, f"{place}: a file was written, read back and removed")


def check_credentials(machine: Machine) -> Finding:
    """Credentials for gs://, where something is there: found, not tried; 'output' tries them."""
    requirements = machine.requirements
    used = [
        path for path in (requirements.output, requirements.data_dir) if path.startswith("gs://")
    ]
    named = machine.environment.get("GOOGLE_APPLICATION_CREDENTIALS")
    if named and not Path(named).is_file():
        text = f"GOOGLE_APPLICATION_CREDENTIALS names {named}, which is not there"
        return Finding("credentials", RED, text, "unset GOOGLE_APPLICATION_CREDENTIALS, or mend it")
    if named:
        return Finding("credentials", GREEN, f"GOOGLE_APPLICATION_CREDENTIALS: {named}")
    home = Path(machine.environment.get("HOME", "/nonexistent"))
    if (home / _ADC).is_file():
        return Finding("credentials", GREEN, f"the user's: ~/{_ADC}")
    try:
        account, _ = machine.ask_metadata("instance/service-accounts/default/email")
        return Finding("credentials", GREEN, f"the machine's service account: {account}")
    except OSError as error:
        text = f"none found (metadata server: {error})"
    if not used:
        return Finding("credentials", GREEN, f"{text}; nothing at gs:// is asked for")
    return Finding("credentials", RED, f"{text}, for {used[0]}",
                   "gcloud auth application-default login")  # fmt: skip


def check_dataset(machine: Machine) -> Finding:
    """The first record is read and decoded, in a child: TensorFlow may abort."""
    folder = machine.requirements.data_dir
    if not folder:
        return Finding("dataset", YELLOW, "not looked at", "--data-dir DIR")
    words = [machine.python, "-m", _RECORD, folder]
    if machine.requirements.data_name:
        words.append(machine.requirements.data_name)
    answer = machine.run(words, timeout_s=180, PJRT_DEVICE="CPU", TF_CPP_MIN_LOG_LEVEL="2")
    lines = [line for line in answer.output.splitlines() if line.startswith("{")]
    if answer.code != 0 or not lines:
        reason = answer.reason.removeprefix("error: ")
        hint = "python -m tools.prepare_dataset, or another --data-dir"
        return Finding("dataset", RED, f"{folder}: {reason}", hint)
    found = json.loads(lines[-1])
    text = (
        f"{found['name']} {found['split']}: {found['examples']} examples; {found['id']} decodes, "
        f"label {found['label']}, in {answer.seconds:.1f} s"
    )
    return Finding("dataset", GREEN, text, value=f"{found['name']} {found['examples']}")


def _try_directory(path: Path, text: str) -> Path:
    """Write below the nearest directory that is there: a new run store is made later."""
    while not path.exists():
        path = path.parent
    if not path.is_dir():
        raise NotADirectoryError(f"{path} is a file")
    probe = path / f".doctor-{text}"
    try:
        with probe.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if probe.read_text() != text:
            raise OSError("what was written is not what is read back")
    finally:
        if probe.exists():
            probe.unlink()
    return path


def _try_url(url: str, text: str) -> None:
    import fsspec

    system, path = fsspec.core.url_to_fs(url)
    try:
        system.pipe_file(path, text.encode())
        if system.cat_file(path) != text.encode():
            raise OSError("what was written is not what is read back")
    finally:
        if system.exists(path):
            system.rm_file(path)
