"""Checks of what is generated: text, streams, batches, sampling."""

from __future__ import annotations

import threading
from typing import Any

from lpxbuild.smoke.client import BLS, ENSEMBLE, RequestFailed
from lpxbuild.smoke.registry import (
    ANSWER_TOKENS,
    OTHER_PROMPTS,
    PROMPT,
    UNICODE_PROMPT,
    CheckFailed,
    Skipped,
    Subject,
    check,
    require,
)


@check("unary")
def unary(subject: Subject) -> str:
    """An answer over gRPC and over HTTP, the same, and not empty."""
    over_grpc = subject.single(PROMPT, ANSWER_TOKENS)
    require(bool(over_grpc.strip()), f"the answer to {PROMPT!r} is empty: {over_grpc!r}")
    over_http = subject.client.text_over_http(subject.greedy(PROMPT, ANSWER_TOKENS))
    require(over_http == over_grpc, f"HTTP answered {over_http!r}, gRPC {over_grpc!r}")
    return f"{over_grpc!r} over gRPC and HTTP"


@check("streaming")
def streaming(subject: Subject) -> str:
    """The pieces of a stream, joined, are the text of the unary answer."""
    whole = subject.single(PROMPT, ANSWER_TOKENS)
    fields = subject.greedy(PROMPT, ANSWER_TOKENS, stream=True)
    if not subject.streaming:
        try:
            subject.client.infer(ENSEMBLE, [fields])
        except RequestFailed as error:
            require("streaming" in str(error), f"stream=true is refused without naming serve.streaming: {error}")
            return "not decoupled: stream=true is refused, naming serve.streaming"
        raise CheckFailed("the repository is not decoupled, yet stream=true was accepted")
    with subject.client.stream(ENSEMBLE, [fields]) as stream:
        pieces = [text for response in stream for text in response.texts()]
    require("".join(pieces) == whole, f"the stream is {''.join(pieces)!r}, the unary answer {whole!r}")
    require(len(pieces) > 1, f"the whole answer came in one piece: {pieces}")
    events = subject.client.pieces_over_http(subject.greedy(PROMPT, ANSWER_TOKENS))
    require("".join(events) == whole, f"generate_stream gives {''.join(events)!r}, the unary answer is {whole!r}")
    return f"{len(pieces)} pieces over gRPC, {len(events)} over HTTP, joined equal to the unary text"


@check("unequal batch")
def unequal_batch(subject: Subject) -> str:
    """Two prompts of different lengths in one request, each answered as if it were alone."""
    model = subject.client.model(ENSEMBLE)
    if model.max_batch_size < 2:
        raise Skipped(f"max_batch_size is {model.max_batch_size}")
    prompts = [PROMPT, OTHER_PROMPTS[0]]
    rows = [subject.greedy(text, ANSWER_TOKENS) for text in prompts]
    texts: dict[int, str] = {}
    responses = subject.client.responses(ENSEMBLE, rows)
    if len(responses) == 1 and len(responses[0].texts()) == len(prompts):
        texts = dict(enumerate(responses[0].texts()))
    else:
        for response in responses:
            index = response.outputs.get("batch_index")
            if index is None:
                raise CheckFailed("responses of a batch carry no batch_index")
            row = int(index.reshape(-1)[0])
            texts[row] = texts.get(row, "") + "".join(response.texts())
    for row, prompt in enumerate(prompts):
        alone = subject.single(prompt, ANSWER_TOKENS)
        require(texts.get(row) == alone, f"row {row} of the batch is {texts.get(row)!r}, alone it is {alone!r}")
    return "2 prompts of different lengths, each as alone"


@check("stop words")
def stop_words(subject: Subject) -> str:
    """The text ends before a stop word, wherever tokens begin; empty words change nothing."""
    whole = subject.single(PROMPT, ANSWER_TOKENS)
    # Three letters from the middle: in most texts they begin and end inside of tokens.
    middle = len(whole) // 2
    word = whole[middle : middle + 3]
    if middle == 0 or not word.strip():
        raise Skipped(f"the answer {whole!r} is too short to choose a stop word from")
    wanted = whole[: whole.index(word)]
    found = subject.client.text(subject.greedy(PROMPT, ANSWER_TOKENS, stop_words=["\0never\0", word]))
    require(found == wanted, f"with stop word {word!r} the text is {found!r}, wanted {wanted!r}")
    unchanged = subject.client.text(subject.greedy(PROMPT, ANSWER_TOKENS, stop_words=[""]))
    require(unchanged == whole, f"the empty stop word changed the text to {unchanged!r}")
    return f"{word!r} ends the text; an empty word does not"


@check("unicode round trip")
def unicode_round_trip(subject: Subject) -> str:
    """Text beyond ASCII goes in and comes back, whole and in a stream."""
    fields = dict(subject.greedy(UNICODE_PROMPT, 4))
    if "exclude_input_in_output" not in fields:
        raise Skipped("the ensemble has no exclude_input_in_output: the prompt cannot be asked back")
    fields["exclude_input_in_output"] = False
    echoed = subject.client.text(fields)
    require(
        echoed.lstrip().startswith(UNICODE_PROMPT), f"{UNICODE_PROMPT!r} came back as {echoed[: len(UNICODE_PROMPT)]!r}"
    )
    whole = subject.single(UNICODE_PROMPT, ANSWER_TOKENS)
    if subject.streaming:
        pieces = subject.client.pieces_over_http(subject.greedy(UNICODE_PROMPT, ANSWER_TOKENS))
        require("".join(pieces) == whole, f"the stream is {''.join(pieces)!r}, the unary answer {whole!r}")
    return f"{UNICODE_PROMPT!r} came back unchanged"


@check("max_tokens 1")
def one_token(subject: Subject) -> str:
    """One token is asked for and one is made."""
    fields = subject.greedy(PROMPT, 1, return_num_output_tokens=True)
    responses = subject.client.responses(ENSEMBLE, [fields])
    counts = [int(r.outputs["num_output_tokens"].reshape(-1)[0]) for r in responses if "num_output_tokens" in r.outputs]
    require(len(responses) == 1, f"{len(responses)} responses to a request for one token")
    if counts:
        require(counts[-1] == 1, f"num_output_tokens is {counts[-1]}")
        return "1 token by the server's own count"
    whole = subject.single(PROMPT, ANSWER_TOKENS)
    text = responses[0].texts()[0] if responses[0].texts() else ""
    require(whole.startswith(text), f"one token gives {text!r}, more give {whole!r}")
    return f"{text!r}"


@check("bls equals ensemble")
def bls_equals_ensemble(subject: Subject) -> str:
    """tensorrt_llm_bls, where it is served, answers like the ensemble, whole and in a stream."""
    try:
        subject.client.model(BLS)
    except RequestFailed as error:
        if "unknown model" in str(error).lower():
            raise Skipped(f"the server has no model {BLS}") from error
        raise
    whole = subject.single(PROMPT, ANSWER_TOKENS)
    found = subject.client.text(subject.greedy(PROMPT, ANSWER_TOKENS), model=BLS)
    require(found == whole, f"{BLS} answers {found!r}, the ensemble {whole!r}")
    if not subject.streaming:
        return "the same text"
    fields = subject.greedy(PROMPT, ANSWER_TOKENS, stream=True)
    with subject.client.stream(BLS, [fields]) as stream:
        pieces = [text for response in stream for text in response.texts()]
    require(
        # With accumulate_tokens each response has the whole text so far.
        "".join(pieces) == whole or pieces[-1:] == [whole],
        f"the stream of {BLS} is {pieces}, the unary answer {whole!r}",
    )
    require(len(pieces) > 1, f"the whole answer came in one piece: {pieces}")
    return f"the same text, whole and in {len(pieces)} pieces"


@check("concurrent requests")
def concurrent_requests(subject: Subject) -> str:
    """Requests that run together get the answers that they get alone."""
    prompts = [PROMPT, *OTHER_PROMPTS]
    alone = {prompt: subject.single(prompt, ANSWER_TOKENS) for prompt in prompts}
    found: dict[str, str] = {}
    errors: list[str] = []

    def ask(prompt: str) -> None:
        try:
            found[prompt] = subject.client.text(subject.greedy(prompt, ANSWER_TOKENS, stream=subject.streaming))
        except RequestFailed as error:
            errors.append(f"{prompt!r}: {error}")

    threads = [threading.Thread(target=ask, args=(prompt,), daemon=True) for prompt in prompts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    require(not errors, "; ".join(errors))
    for prompt in prompts:
        require(
            found[prompt] == alone[prompt], f"{prompt!r} gave {found[prompt]!r} in company, {alone[prompt]!r} alone"
        )
    return f"{len(prompts)} at once, each as alone"


@check("seed")
def seed(subject: Subject) -> str:
    """The same seed samples the same text."""
    sampling: dict[str, Any] = {"top_k": 50, "temperature": 1.0}
    missing = {"seed", "temperature", "top_k"} - set(subject.client.model(ENSEMBLE).inputs)
    if missing:
        raise Skipped(f"the ensemble has no input {', '.join(sorted(missing))}")

    def ask(number: int) -> str:
        return subject.client.text(subject.greedy(PROMPT, ANSWER_TOKENS, **sampling, seed=number))

    first, again = ask(7), ask(7)
    require(first == again, f"seed 7 gave {first!r}, then {again!r}")
    others = {ask(number) for number in (8, 9, 10)}
    require(others != {first}, f"seeds 7, 8, 9 and 10 all gave {first!r}: the seed is ignored")
    return "same seed, same text; other seeds, other texts"
