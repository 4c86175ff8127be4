"""Stand-in for the executor of an engine host: emits scripted ids. Takes the place of engine_executor_paged.py.

`replay.json` in the engine folder: {"scripts": {LAST PROMPT ID: [ids, …]}, "delay": seconds per step, "at_once": how
many requests get a token in one step}. Everything around it (host, stubs, Triton) is the real thing.
"""

from __future__ import annotations

import json
import time

from engine_executor import Event, SequenceTokens


class PagedExecutor:
    def __init__(self, engine, description):
        replay = json.loads((engine / "replay.json").read_text())
        self._scripts = {int(key): ids for key, ids in replay["scripts"].items()}
        self._delay = replay["delay"]
        self._at_once = replay["at_once"]
        self._running = {}

    @property
    def busy(self):
        return bool(self._running)

    def add(self, key, request):
        # Without a script the prompt is repeated, so that any request gets any number of tokens.
        script = self._scripts.get(request.input_ids[-1]) or list(request.input_ids)
        self._running[key] = {"request": request, "script": script, "made": 0, "cancelled": False}

    def cancel(self, key):
        if key in self._running:
            self._running[key]["cancelled"] = True

    def step(self):
        if not self._running:
            return []
        time.sleep(self._delay)
        events = []
        for key, running in list(self._running.items()):
            if running["cancelled"]:
                events.append(Event(key, reason="cancelled"))
                del self._running[key]
        for key in list(self._running)[: self._at_once]:
            events.append(self._token(key))
        return events

    def _token(self, key):
        running = self._running[key]
        request, script, made = running["request"], running["script"], running["made"]
        token = script[made % len(script)]
        running["made"] = made = made + 1
        if token in request.end_ids and made > request.min_tokens:
            del self._running[key]
            return Event(key, reason="stop")
        reason = "length" if made >= request.max_tokens else None
        if reason:
            del self._running[key]
        return Event(key, [SequenceTokens(0, [token], [0.0] if request.log_probs else [])], reason)

    def close(self):
        self._running.clear()
