"""Folders on a local disk or behind an fsspec URL, and how something whole appears in them.

`places` opens what a person writes, `local` and `remote` are the two kinds of `folder`, `retry`
makes calls to a store again.
"""

from utils.storage.folder import ASIDE, COMMIT_FILE, Folder, StorageError, choose_aside_name
from utils.storage.local import (
    LocalFolder,
    compute_crc32c,
    get_old_name,
    give_usual_mode,
    sync_directory,
    sync_file,
    write_atomically,
)
from utils.storage.places import (
    check_writable,
    describe_refusal,
    is_remote,
    is_there,
    join_place,
    open_folder,
    to_path,
)
from utils.storage.remote import RemoteFolder
from utils.storage.retry import hurry

__all__ = [
    "ASIDE",
    "COMMIT_FILE",
    "Folder",
    "LocalFolder",
    "RemoteFolder",
    "StorageError",
    "check_writable",
    "choose_aside_name",
    "compute_crc32c",
    "describe_refusal",
    "get_old_name",
    "give_usual_mode",
    "hurry",
    "is_remote",
    "is_there",
    "join_place",
    "open_folder",
    "sync_directory",
    "sync_file",
    "to_path",
    "write_atomically",
]
