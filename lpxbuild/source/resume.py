"""Downloads of weight files over plain HTTP that go on where an earlier run stopped.

huggingface_hub 2.x begins a file anew in each run. This module loads the bytes into a partial file of its own and puts
the whole file where the library looks for it; the library then does the book-keeping. Files in Xet storage are left
to the library, whose transport for them is faster than ranges.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import re
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

_SHA256 = re.compile(r"[0-9a-f]{64}")
_BLOCK = 8 << 20


def preload(repository: str, name: str, *, commit: str, folder: Path, token: str | bool, endpoint: str | None) -> None:
    """Put a weight file where `hf_hub_download` finds it instead of loading it.

    Nothing is done for a file that is there already, is not stored by LFS, or can be loaded through Xet.

    Args:
        folder: the snapshot in the hub's cache, or a plain folder.

    Raises:
        The errors of huggingface_hub and of its HTTP library; what has arrived is kept.
    """
    if (folder / name).exists():
        return
    from huggingface_hub import get_hf_file_metadata, hf_hub_url

    url = hf_hub_url(repository, name, revision=commit, endpoint=endpoint)
    found = get_hf_file_metadata(url, token=token, endpoint=endpoint)
    if found.size is None or found.etag is None or not _SHA256.fullmatch(found.etag) or _by_xet(found):
        return
    # The token is for the hub, not for the storage that it points to.
    same_host = urlsplit(found.location).netloc == urlsplit(url).netloc
    headers = {"authorization": f"Bearer {token}"} if token and same_host else {}
    in_cache = folder.parent.name == "snapshots"
    target = folder.parents[1] / "blobs" / found.etag if in_cache else folder / name
    partial = target.with_name(f"{target.name}.lpx-partial")
    with partial.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # another run may be loading the same file: wait for its end
        if target.exists() or not partial.exists():
            partial.unlink(missing_ok=True)
            return
        begun = file.tell()
        if begun > found.size:
            file.truncate(0)
            begun = 0
        _load(found.location, file, begun, headers, found.size)
        file.flush()
        # The library checks sizes only; a file of two halves is hashed, because the halves could be of two files.
        if begun and _sha256(partial) != found.etag:
            file.truncate(0)
            _load(found.location, file, 0, headers, found.size)
            file.flush()
        partial.replace(target)


def _load(url: str, file: Any, begun: int, headers: dict[str, str], size: int) -> None:
    from huggingface_hub.file_download import http_get

    if begun < size:
        http_get(url, file, resume_size=begun, headers=headers, expected_size=size)


def _by_xet(found: Any) -> bool:
    from huggingface_hub import constants

    usable = importlib.util.find_spec("hf_xet") is not None and not constants.HF_HUB_DISABLE_XET
    return usable and found.xet_file_data is not None


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()
