"""`nsa` in forks of this process, which has imported torch before: alone, as ranks, with file operations that fail."""

from __future__ import annotations

import builtins
import io
import itertools
import os
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from waiting import PATIENCE_S

from nsa import cli

OPERATIONS = ("fsync", "replace", "rename", "mkdir", "unlink", "rmdir", "open", "scandir")


class Faults:
    """Counts the file operations below `folder`, and lets those whose numbers are in `failing` fail with `code`."""

    def __init__(self, folder: Path, failing: range = range(0), code: int = 0) -> None:
        self.folder, self.failing, self.code = str(folder), failing, code
        self.numbers = itertools.count()
        self.open = builtins.open

    def install(self) -> None:
        for name in OPERATIONS:
            setattr(os, name, self.wrap(getattr(os, name)))
        builtins.open = io.open = self.open_file  # type: ignore[assignment]

    def fails(self, path: Any) -> bool:
        path = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fsdecode(path)
        return path.startswith(self.folder) and next(self.numbers) in self.failing

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(path: Any, *args: Any, **options: Any) -> Any:
            if options.get("dir_fd") is None and self.fails(path):
                raise OSError(self.code, os.strerror(self.code), None if isinstance(path, int) else str(path))
            return function(path, *args, **options)

        return wrapped

    def open_file(self, path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
        if not isinstance(path, int) and set(mode) & set("wxa+") and self.fails(path):
            # A buffer takes what is written, and flushing fails with ENOSPC.
            return self.open("/dev/full", mode.replace("x", "w"), *args, **{**options, "opener": None})
        return self.open(path, mode, *args, **options)


class Fork:
    """A fork that calls a function, whose result is its exit status, with more variables in its environment."""

    def __init__(self, call: Callable[[], int], printed: Path, **environment: str) -> None:
        self.printed, self.begin = printed, time.monotonic()
        # What an earlier one wrote.
        printed.unlink(missing_ok=True)
        self.pid = os.fork()
        if self.pid == 0:
            status = 70
            try:
                output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
                for descriptor in (1, 2):
                    os.dup2(output, descriptor)
                sys.stdout = os.fdopen(1, "w", buffering=1)
                sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace")
                os.environ.update(environment)
                status = call()
            except BaseException:  # noqa: BLE001  # what nsa let through, as the interpreter would show it
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(status)

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def wait(self) -> tuple[int, str]:
        """The exit status (negative: the signal) and what was printed; one that hangs is killed."""
        while not (ended := os.waitpid(self.pid, os.WNOHANG))[0]:
            if time.monotonic() - self.begin > PATIENCE_S:
                self.kill()
            time.sleep(0.01)
        # One that was killed at once has not made the file yet.
        printed = self.printed.read_text(errors="replace") if self.printed.is_file() else ""
        return os.waitstatus_to_exitcode(ended[1]), printed


class Start(Fork):
    """A fork that runs `nsa ARGV`."""

    def __init__(self, argv: list[str], printed: Path, faults: Faults | None = None, **environment: str) -> None:
        def call() -> int:
            if faults is None:
                return cli.main(argv)
            faults.install()
            status = cli.main(argv)
            print("operations", next(faults.numbers))
            return status

        super().__init__(call, printed, **environment)


def rank_variables(n: int) -> list[dict[str, str]]:
    """What torchrun would set for each of `n` ranks on as many machines."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = str(s.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(n), "TORCHELASTIC_RUN_ID": "test"}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": "0"} for rank in range(n)]
