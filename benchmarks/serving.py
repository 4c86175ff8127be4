"""What Triton costs: the same engine through the ensemble (gRPC streams) and alone (engine host's own socket).

SmolLM2-135M, precision fast, prompts of about 32 tokens that share no beginning, 64 new tokens each. One stream:
extra time to first token in ms, and the ratio of tokens/s; eight streams: the ratio of tokens/s over all. Rounds
alternate in one process against one running server; median, quartiles, n. Exit status 1 where a bound is missed.
"""

from __future__ import annotations

import os
import queue
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import tritonclient.grpc as triton
from tokenizers import Tokenizer

from lpxbuild import server
from lpxbuild.output import Output
from lpxbuild.pipeline import build
from lpxbuild.recipe import Recipe
from lpxbuild.recipe.library import find

NEW_TOKENS = 64
ROUNDS = 7
WORDS = ("river", "stone", "cloud", "paper", "green", "seven", "music", "light", "table", "under", "quiet", "winter")
OVERRIDES = ["name=benchmark-serving", "runtime.precision=fast", "quantization.format=none", "parallel.tensor=1"]

Stream = Callable[[str], tuple[float, float, int]]
"""prompt → (seconds to first token, seconds in all, tokens)."""


def prompt(generator: random.Random) -> str:
    """About 32 tokens."""
    return " ".join(generator.choice(WORDS) for _ in range(30))


def through_ensemble(url: str) -> Stream:
    """A gRPC stream of its own per caller."""

    def tensor(name: str, value: object, kind: str) -> triton.InferInput:
        made = triton.InferInput(name, [1, 1], kind)
        types = {"BYTES": np.object_, "INT32": np.int32, "BOOL": np.bool_}
        made.set_data_from_numpy(np.array([[value]], dtype=types[kind]))
        return made

    client = triton.InferenceServerClient(url)
    answers: queue.Queue[object] = queue.Queue()
    client.start_stream(lambda result, error: answers.put(error if error is not None else result))

    def stream(text: str) -> tuple[float, float, int]:
        inputs = [
            tensor("text_input", text, "BYTES"),
            tensor("max_tokens", NEW_TOKENS, "INT32"),
            tensor("min_tokens", NEW_TOKENS, "INT32"),
            tensor("stream", True, "BOOL"),
        ]
        begin = time.perf_counter()
        client.async_stream_infer("ensemble", inputs, enable_empty_final_response=True)
        first, pieces = 0.0, 0
        while True:
            answer = answers.get(timeout=120)
            if not isinstance(answer, triton.InferResult):
                raise SystemExit(f"the ensemble refused: {answer}")
            if answer.as_numpy("text_output") is not None:
                first = first or time.perf_counter() - begin
                pieces += 1
            if answer.get_response().parameters["triton_final_response"].bool_param:
                return first, time.perf_counter() - begin, NEW_TOKENS

    return stream


def engine_alone(folder: Path, sockets: Path, tokenizer: Tokenizer) -> Stream:
    """The engine host's protocol, as the Triton models speak it."""
    sys.path.insert(0, str(folder))
    os.environ["LPX_ENGINE_DIR"] = str(sockets)
    from engine_client import EngineClient  # type: ignore[import-not-found]

    client = EngineClient(folder / "engine", role="probe")

    def stream(text: str) -> tuple[float, float, int]:
        messages: queue.Queue[dict[str, object]] = queue.Queue()
        request = {
            "input_ids": tokenizer.encode(text).ids,
            "max_tokens": NEW_TOKENS,
            "min_tokens": NEW_TOKENS,
        }
        begin = time.perf_counter()
        client.add(request, messages.put)
        first, count = 0.0, 0
        while True:
            message = messages.get(timeout=120)
            if message["op"] == "tokens":
                first = first or time.perf_counter() - begin
                count += sum(len(sequence["ids"]) for sequence in message["sequences"])  # type: ignore[attr-defined]
            elif message.get("reason") == "error":
                raise SystemExit(f"the engine refused: {message['message']}")
            if message.get("last"):
                return first, time.perf_counter() - begin, count

    return stream


def together(streams: list[Stream], texts: list[str]) -> float:
    """Tokens per second over all streams."""
    counts = [0] * len(streams)

    def one(number: int) -> None:
        counts[number] = streams[number](texts[number])[2]

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(streams))]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(counts) / (time.perf_counter() - begin)


def show(
    name: str, values: list[float], unit: str, *, at_least: float | None = None, at_most: float | None = None
) -> bool:
    """Print one figure; whether its median is within the bound."""
    low, middle, high = statistics.quantiles(values, n=4)
    held = (at_least is None or middle >= at_least) and (at_most is None or middle <= at_most)
    bound = f">= {at_least}" if at_least is not None else f"<= {at_most}"
    print(
        f"{name}: median {middle:.2f}{unit}  quartiles {low:.2f}-{high:.2f}  n={len(values)}  "
        f"(bound {bound}{unit}: {'held' if held else 'MISSED'})"
    )
    return held


def main() -> int:
    generator = random.Random(1)
    recipe_path = find("smollm2-135m-int8-tp3")
    with tempfile.TemporaryDirectory() as work:
        built = build(
            Recipe.load(recipe_path, OVERRIDES), to="repository", build_dir=Path(work), output=Output("human")
        )
        repository = built.path / "repository"
        with server.start(repository, log_path=Path(work) / "triton.log") as running:
            version = repository / "tensorrt_llm" / "1"
            tokenizer = Tokenizer.from_file(str(version / "tokenizer" / "tokenizer.json"))
            alone = engine_alone(version, running.runtime.folder, tokenizer)
            ensemble = [through_ensemble(running.grpc_url) for _ in range(8)]
            for stream in (alone, *ensemble):
                stream(prompt(generator))
            first, single, eight = [], [], []
            for number in range(ROUNDS):
                order = (ensemble[0], alone) if number % 2 else (alone, ensemble[0])
                times = {stream: stream(prompt(generator)) for stream in order}
                first.append((times[ensemble[0]][0] - times[alone][0]) * 1000)
                single.append(times[alone][1] / times[ensemble[0]][1])
                groups = (ensemble, [alone] * 8) if number % 2 else ([alone] * 8, ensemble)
                rates = [together(group, [prompt(generator) for _ in range(8)]) for group in groups]
                served, bare = rates if groups[0] is ensemble else reversed(rates)
                eight.append(served / bare)
    held = [
        show("one stream, time to first token, ensemble - engine", first, " ms", at_most=5.0),
        show("one stream, tokens/s, ensemble / engine", single, "x", at_least=0.9),
        show("eight streams, tokens/s, ensemble / engine", eight, "x", at_least=0.8),
    ]
    return int(not all(held))


if __name__ == "__main__":
    sys.exit(main())
