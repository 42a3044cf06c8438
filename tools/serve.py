"""Shows, compares, starts and stops runs in a browser: `python -m tools.serve --store runs`.

    python -m tools.serve --store runs
    python -m tools.serve --store gs://bucket/runs --port 8080
    python -m tools.serve --store runs --add-token monitor --role view

Jobs that are submitted are started by a dispatcher beside it, as many at once as there are --slots.
It prints a start URL, which signs a browser in once; programs send a token that --add-token makes
as `Authorization: Bearer TOKEN`. It listens on this machine alone: reach it from another one by
`ssh -L 8080:127.0.0.1:8080 HOST`. docs/service.md says the rest.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from service.jobs.slots import parse_slots
from service.jobs.supervisor import DispatcherSupervisor
from service.places import check_root
from service.web.audit import AuditLog
from service.web.settings import LOOPBACK, ServiceSettings
from service.web.tokens import TokenBook, get_user
from tools.runs.find_runs import check_store
from utils.errors import UserError
from utils.programs import CommandLine, ProgramParser, create_program_parser
from utils.storage.places import check_writable, is_remote, open_folder
from utils.storage.retry import hurry


def create_parser() -> ProgramParser:
    """Create the parser of the flags."""
    parser = create_program_parser(__doc__, prog="python -m tools.serve")
    add = parser.add_argument
    add("--store", default="runs", help="run.output_dir of the runs: directory or URL (runs)")
    add("--index", default="", metavar="URL", help="another database of the index")
    text = "a directory or bucket that submissions may name, beside the store and data"
    add("--root", action="append", default=[], metavar="PATH", help=text)
    add("--port", type=int, default=8080, help="0: any that is free (8080)")
    add("--host", default="127.0.0.1", help="address to listen on (127.0.0.1)")
    add("--allow-remote", action="store_true", help="let --host be no loopback address")
    text = "a further name by which browsers may call it, without a port"
    add("--allow-host", action="append", default=[], metavar="NAME", help=text)
    text = "let submissions import modules of their own (run.imports), which may do anything"
    add("--allow-imports", action="store_true", help=text)
    text = "hashes of all tokens (default: service/tokens.json in the store)"
    add("--token-file", type=Path, metavar="FILE", help=text)
    add("--slots", default="1", help="jobs at once, or devices: cuda:0,cuda:1 (1)")
    add("--no-queue", action="store_true", help="start no jobs: python -m tools.queue run does")
    add("--add-token", metavar="NAME", help="print a new token that stays, and end")
    add("--role", help="of that token: view, submit or admin (view)")
    return parser


def serve_runs(options: argparse.Namespace) -> None:
    """Check, bind, print the start URL, serve; a UserError if a flag or a package is unusable."""
    with hurry():
        check_reachable(options.store)
    for root in options.root:
        check_root(root)
    host = f"[{options.host}]" if ":" in options.host else options.host
    names = (*LOOPBACK, host.lower(), *(name.lower() for name in options.allow_host))
    settings = ServiceSettings(
        options.store,
        options.index,
        options.token_file,
        hosts=names,
        roots=tuple(options.root),
        allow_imports=options.allow_imports,
    )
    if options.add_token is not None:
        add_token(options, settings)
        return
    if options.role is not None:
        raise UserError("--role is of a token that --add-token NAME makes; leave it out or add it")
    try:
        from service.web.app import create_app
        from service.web.server import bind, is_loopback, serve
    except ImportError as error:
        raise UserError(
            f"tools.serve needs {error.name}; bash run_commands.sh service installs "
            "requirements-service.txt and starts it"
        ) from error
    parse_slots(options.slots)
    if not is_loopback(options.host) and not (options.allow_remote and options.token_file):
        raise UserError(
            f"--host {options.host} lets other machines in; keep 127.0.0.1 and use ssh -L, or give "
            "--allow-remote and --token-file FILE"
        )
    app = create_app(settings)
    with bind(options.host, options.port) as listener:
        address = f"http://{host}:{listener.getsockname()[1]}"
        token = app.state.service.tokens.create_start()
        print(f"runs of {options.store}: {address}/start?token={token}")
        print("The address signs in once. Ctrl-C ends the service, not the runs.", flush=True)
        with contextlib.ExitStack() as stack:
            if not options.no_queue:
                queue = app.state.service.queue
                stack.enter_context(DispatcherSupervisor(queue, options.slots))
            serve(app, listener)


def check_reachable(store: str) -> None:
    """Check that the store can be read.

    Raises:
      UserError: no such directory or bucket.
      StorageError: the bucket cannot be reached, or denies access.
    """
    check_store(store)
    if is_remote(store) and not open_folder(store).list_names():
        # The listing of a missing bucket is empty, too; a new store will be written to.
        check_writable(store, "--store")


def add_token(options: argparse.Namespace, settings: ServiceSettings) -> None:
    """Print a new token, which is valid until its row is removed from the file."""
    name, role = options.add_token, options.role or "view"
    token = TokenBook(settings.tokens_path).add(name, role)
    AuditLog(settings.state_folder).add(get_user(), "token", name=name, role=role)
    print(f"{name} ({role}): {token}")
    print(f"It is shown only once; {settings.tokens_path} keeps its hash.")


main = CommandLine(create_parser, serve_runs, logs=True, interrupted="stopped")

if __name__ == "__main__":
    sys.exit(main())
