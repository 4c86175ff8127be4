"""A served repository whose engine is exchanged: its host is ended, and the supervisor starts the next one."""

from __future__ import annotations

import shutil
from pathlib import Path

from traces import wait_until

from lpxbuild.server import ServerSettings, SupervisorSettings
from lpxbuild.smoke.client import TritonClient

TOKENS = 32
SETTINGS = ServerSettings(supervisor=SupervisorSettings(poll=0.05, most_repairs=1000))


class Served:
    """A served repository whose engine can be exchanged."""

    def __init__(self, server, repository: Path) -> None:
        self.server = server
        self.engine = repository / "tensorrt_llm" / "1" / "engine"
        self.client = TritonClient(server.http_url, server.grpc_url, idle=30)

    def exchange(self, engine: Path) -> None:
        if self.engine.is_symlink():
            self.engine.unlink()
        else:
            shutil.rmtree(self.engine)
        self.engine.symlink_to(engine)
        before = len(self.server.repairs)
        self.server.engine_host.kill()
        wait_until(lambda: len(self.server.repairs) > before, 30, "the next engine host")

    def greedy(self, ids: list[int], *, log_probs: bool = True) -> tuple[list[int], list[float]]:
        """Tokens and their log-probabilities (none where they are not asked for); end ids are switched off."""
        fields = {
            "input_ids": ids,
            "input_lengths": len(ids),
            "request_output_len": TOKENS,
            "end_id": -1,
            "exclude_input_in_output": True,
            "return_log_probs": log_probs,
        }
        (response,) = self.client.responses("tensorrt_llm", [fields])
        length = int(response.outputs["sequence_length"].reshape(-1)[0])
        tokens = response.outputs["output_ids"].reshape(-1)[:length]
        if not log_probs:
            return tokens.tolist(), []
        return tokens.tolist(), response.outputs["output_log_probs"].reshape(-1)[:length].tolist()
