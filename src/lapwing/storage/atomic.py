"""Write a file atomically: it is replaced as a whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from typing import IO

from lapwing.errors import StorageError


def replace_file(path: Path, fill: Callable[[IO[bytes]], None]) -> None:
    """Write to a temporary file beside `path`, sync it, and rename it.

    If anything fails, the old file is unchanged.
    """
    path = Path(os.path.realpath(path))  # follow a symbolic link instead of replacing it
    temporary = path.with_name(f".{path.name}.{token_hex(4)}.tmp")
    try:
        with open(temporary, "wb") as file:
            fill(file)
            file.flush()
            # Data must be on disk before the rename, or a crash could leave an empty file under the final name.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        _removed(temporary)
        raise StorageError(
            f"{path} could not be written ({error.strerror or error}); an existing file is unchanged."
        ) from error
    # Also for KeyboardInterrupt: leave no temporary file behind.
    except BaseException:
        _removed(temporary)
        raise
    _sync_directory(path.parent)


def _removed(path: Path) -> None:
    with suppress(OSError):
        path.unlink()


def _sync_directory(directory: Path) -> None:
    """Sync the rename itself. Not every system allows a directory to be opened, so errors are ignored."""
    with suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
