"""What the server tests share: a look at what is left behind, and stand-in repositories."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

if importlib.util.find_spec("pytriton") is None:
    collect_ignore_glob = ["test_*.py"]

sys.path.insert(0, str(Path(__file__).parent))

import tiny_model
from traces import Shm, nothing_left


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The backend directory of the embedded server goes to a temporary folder, not to the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LPX_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def traces() -> Iterator[Shm]:
    """Fails the test when it leaves something behind; the test names the prefixes of its servers' shared memory."""
    with nothing_left() as shm:
        yield shm


@pytest.fixture
def plain_repository(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stand-in repositories lack most official tensors, so that lpx would refuse them before the server is reached."""
    from lpxbuild.server import checks

    monkeypatch.setattr(checks, "check_repository", lambda _repository: None)


@pytest.fixture(scope="session")
def tiny_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Engine of a tiny random llama: format none, float32, exact; 96 input tokens, 320 in all."""
    place = tmp_path_factory.mktemp("tiny")
    return tiny_model.build_engine(tiny_model.make_source(place / "source"), place / "built")


@pytest.fixture(scope="session")
def tiny_repository(tiny_engine: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its repository, with two postprocessing instances."""
    return tiny_model.build_repository(
        tiny_engine, tmp_path_factory.mktemp("tiny_repository") / "repository", postprocessing_instances=2
    )


@pytest.fixture(scope="session")
def tiny_server(tiny_repository: Path, tmp_path_factory: pytest.TempPathFactory):
    """That repository, served once for all tests that do not kill anything."""
    from lpxbuild.server import start

    with start(tiny_repository, log_path=tmp_path_factory.mktemp("tiny_log") / "triton.log") as server:
        yield server


@pytest.fixture(scope="session")
def triton(tiny_server):
    """A client of it."""
    from lpxbuild.smoke.client import TritonClient

    return TritonClient(tiny_server.http_url, tiny_server.grpc_url, idle=30)


@pytest.fixture
def slow_repository(tiny_engine: Path, tmp_path: Path) -> Path:
    """Repeats the prompt, one token each 0.1 s for all running requests together."""
    repository = tiny_model.build_repository(tiny_engine, tmp_path / "slow")
    return tiny_model.make_replay(repository, {}, delay=0.1)


@pytest.fixture(scope="session")
def beam_server(tmp_path_factory: pytest.TempPathFactory):
    """The same weights without streaming, two beams at most, served once."""
    from lpxbuild.server import start

    place = tmp_path_factory.mktemp("beams")
    engine = tiny_model.build_engine(tiny_model.make_source(place / "source"), place / "built", max_beam_width=2)
    repository = tiny_model.build_repository(engine, place / "repository", decoupled=False, max_beam_width=2)
    with start(repository, log_path=place / "triton.log") as server:
        yield server
