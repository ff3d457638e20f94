"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from pathlib import Path


def write_atomically(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write `data` to a new file beside `path` and rename it: readers see the old file or the new one, whatever fails in between. Parts
    are taken one by one, as they are written."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"qsim: cannot write {str(path)!r}: there is no folder {str(path.parent)!r}; make it first")
    if path.is_dir():
        raise IsADirectoryError(f"qsim: cannot write {str(path)!r}: it is a folder; give the name of a file in it")
    temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as stream:
            stream.writelines([data] if isinstance(data, bytes) else data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
