"""Checks of the dataset's first record and of the run store."""

from __future__ import annotations

import json
import os
import uuid
from pathlib import Path

from tools.doctor.machine import Finding, Machine, green, red, yellow
from utils.storage.installation import get_workplace

_ADC = ".config/gcloud/application_default_credentials.json"


def check_output(machine: Machine) -> Finding:
    """Check that a file can be written to the run store, read back and removed."""
    output = machine.requirements.output
    text = uuid.uuid4().hex
    try:
        if "://" in output:
            path = output
            _try_url(f"{output.rstrip('/')}/doctor-{text}", text)
        else:
            path = _try_directory(get_workplace() / output, text)
    except ImportError as error:
        hint = "pip install gcsfs" if output.startswith("gs://") else "pip install fsspec"
        return red(f"{output}: {error}", hint)
    except Exception as error:  # each storage has its own errors
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        way_out = f"another --output, or chmod u+w {output}"
        hint = "see 'credentials'" if "://" in output else way_out
        return red(f"{output} cannot be written: {reason}", hint)
    return green(f"{path}: a file was written, read back and removed")


def check_credentials(machine: Machine) -> Finding:
    """Check that credentials for gs:// exist, if it is used; 'output' tries them."""
    requirements = machine.requirements
    used = [
        path for path in (requirements.output, requirements.data_dir) if path.startswith("gs://")
    ]
    named = machine.environment.get("GOOGLE_APPLICATION_CREDENTIALS")
    if named and not Path(named).is_file():
        text = f"GOOGLE_APPLICATION_CREDENTIALS names {named}, which does not exist"
        return red(text, "unset GOOGLE_APPLICATION_CREDENTIALS, or correct it")
    if named:
        return green(f"GOOGLE_APPLICATION_CREDENTIALS: {named}")
    home = Path(machine.environment.get("HOME", "/nonexistent"))
    if (home / _ADC).is_file():
        return green(f"the user's: ~/{_ADC}")
    try:
        account, _ = machine.fetch_metadata("instance/service-accounts/default/email")
        return green(f"the machine's service account: {account}")
    except OSError as error:
        text = f"none found (metadata server: {error})"
    if not used:
        return green(f"{text}; none needed")
    return red(f"{text}, for {used[0]}", "gcloud auth application-default login")


def check_dataset(machine: Machine) -> Finding:
    """Check that the first record can be read and decoded, in a child: TensorFlow may abort."""
    folder = machine.requirements.data_dir
    if not folder:
        return yellow("not looked at", "--data-dir DIR")
    words = [machine.python, "-m", "tools.doctor.first_record", folder]
    words += [machine.requirements.data_name] if machine.requirements.data_name else []
    done = machine.run(words, timeout_s=180, PJRT_DEVICE="CPU", TF_CPP_MIN_LOG_LEVEL="2")
    lines = [line for line in done.output.splitlines() if line.startswith("{")]
    if done.code != 0 or not lines:
        hint = "python -m tools.prepare_dataset, or another --data-dir"
        return red(f"{folder}: {done.reason.removeprefix('error: ')}", hint)
    record = json.loads(lines[-1])
    text = "{name} {split}: {examples} examples; {id} decodes, label {label}".format_map(record)
    value = f"{record['name']} {record['examples']}"
    return green(f"{text}, in {done.seconds:.1f} s", value=value)


def _try_directory(path: Path, text: str) -> Path:
    """Write below the nearest existing directory: a new run store is created later."""
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
            raise OSError("the file read back differs from the written one")
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
            raise OSError("the file read back differs from the written one")
    finally:
        if system.exists(path):
            system.rm_file(path)
