"""What the server tests share: a look at what is left behind, and stand-in repositories."""

from __future__ import annotations

import importlib.util
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

if importlib.util.find_spec("pytriton") is None:
    collect_ignore_glob = ["test_*.py"]

sys.path.insert(0, str(Path(__file__).parent))

from traces import TEST_MARK, Shm, processes_with, zombie_children


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Shm]:
    """Fails the test when it leaves a process, a zombie or a segment of shared memory behind."""
    mark = secrets.token_hex(8)
    monkeypatch.setenv(TEST_MARK, mark)
    shm = Shm()
    yield shm
    deadline = time.monotonic() + 3
    while processes_with(TEST_MARK, mark) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes_with(TEST_MARK, mark) == []
    assert shm.left() == []
    assert zombie_children() == []


@pytest.fixture
def plain_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-in repositories lack most official tensors, so that lpx would refuse them before the server is reached."""
    from lpxbuild.server import checks

    monkeypatch.setattr(checks, "check_repository", lambda _repository: None)
