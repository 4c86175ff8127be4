"""The Python models, called without a server: official tensors in, official tensors out."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "standins"))
from served_modules import CASES, MODEL_REPO, load_model

import engine_protocol as protocol  # isort: skip
import triton_python_backend_utils as pb  # isort: skip
from tiny_engine import write_engine  # isort: skip

VOCABULARY = 320  # of the tokenizer of stream_bytes
TOKENIZER = Tokenizer.from_file(str(CASES / "stream_bytes" / "tokenizer.json"))
PROMPT = "the word"
OUTPUTS = tuple(o["name"] for o in json.loads((MODEL_REPO / "tensorrt_llm" / "tensors.json").read_text())["outputs"])


def model_config(*, decoupled=True, **parameters):
    values = {"gpt_model_path": "engine", "tokenizer_dir": "tokenizer", "engine_python": sys.executable, **parameters}
    return {
        "parameters": {key: {"string_value": value} for key, value in values.items()},
        "model_transaction_policy": {"decoupled": decoupled},
        "output": [{"name": "text_output"}],
    }


def start(name, repository, config):
    model = load_model(name).TritonPythonModel()
    model.initialize({"model_config": json.dumps(config), "model_repository": str(repository), "model_version": "1"})
    return model


@pytest.fixture(scope="module")
def repository(tmp_path_factory):
    """The part of a model repository that the models read, with a tiny engine and the case's tokenizer."""
    root = tmp_path_factory.mktemp("repository")
    write_engine(root / "1" / "engine", vocabulary=VOCABULARY, max_batch_size=4)
    (root / "1" / "tokenizer").mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(CASES / "stream_bytes" / name, root / "1" / "tokenizer" / name)
    return root


@pytest.fixture(scope="module")
def models(repository, tmp_path_factory):
    """tensorrt_llm decoupled (True) and not (False), on one host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(protocol.DIRECTORY_VARIABLE, str(tmp_path_factory.mktemp("socket")))
        found = {d: start("tensorrt_llm", repository, model_config(decoupled=d)) for d in (True, False)}
        yield found
        process = found[True]._engine._process
        os.kill(process.pid, signal.SIGTERM)
        process.wait(20)
        for model in found.values():
            model.finalize()


def tensors(prompts=(PROMPT,), max_tokens=12, **extra):
    """Tensors of a request as the backend sees them: `reshape []` scalars are [rows]."""
    rows = [TOKENIZER.encode(text, add_special_tokens=False).ids for text in prompts]
    width = max(map(len, rows))
    given = {
        "input_ids": np.array([row + [0] * (width - len(row)) for row in rows], dtype=np.int32),
        "input_lengths": np.array([len(row) for row in rows], dtype=np.int32),
        "request_output_len": np.full(len(rows), max_tokens, dtype=np.int32),
        "end_id": np.full(len(rows), -1, dtype=np.int32),
    }
    for name, value in extra.items():
        if isinstance(value, np.ndarray):
            given[name] = value
        else:
            kind = {bool: bool, int: np.uint64 if name == "seed" else np.int32, float: np.float32}[type(value)]
            given[name] = np.full(len(rows), value, dtype=kind)
    return given


def begin(model, given, identity="", requested=()):
    inputs = [pb.Tensor(name, value) for name, value in given.items()]
    request = pb.InferenceRequest(inputs, identity, requested or OUTPUTS)
    assert model.execute([request]) is None
    return request.sender


def finish(sender):
    assert sender.final.wait(60)
    assert not sender.misuse
    return sender.responses


def ask(model, given, identity=""):
    return [response.arrays() for response in finish(begin(model, given, identity))]


def refusal(model, given):
    (response,) = finish(begin(model, given))
    return response.error().message()


def text(responses):
    return b"".join(r["output_text"][0, 0] for r in responses).decode()


def ids(responses):
    return [int(i) for r in responses for i in r["output_ids"][0, 0]]


def words(*texts):
    """Official stop_words_list [1, 2, n]."""
    rows = [TOKENIZER.encode(word, add_special_tokens=False).ids for word in texts]
    flat = [i for row in rows for i in row]
    offsets = np.cumsum([len(row) for row in rows]).tolist()
    return np.array([[flat, offsets + [-1] * (len(flat) - len(offsets))]], dtype=np.int32)


def test_joined_stream_is_the_whole_answer(models):
    whole = ask(models[True], tensors(exclude_input_in_output=True))
    stream = ask(models[True], tensors(streaming=True))
    assert len(whole) == 1
    assert len(stream) > 3
    assert text(stream) == text(whole)
    assert ids(stream) == ids(whole)
    assert text(whole) == TOKENIZER.decode(ids(whole))
    assert whole[0]["sequence_length"].tolist() == [[12]]
    # Not decoupled: the same answer in the one response.
    assert text(ask(models[False], tensors(exclude_input_in_output=True))) == text(whole)


def test_prompt_comes_back_unless_excluded(models):
    (plain,) = ask(models[True], tensors())
    prompt = TOKENIZER.encode(PROMPT, add_special_tokens=False).ids
    assert ids([plain])[: len(prompt)] == prompt
    assert plain["sequence_length"].tolist() == [[len(prompt) + 12]]
    assert text([plain]) == TOKENIZER.decode(ids([plain]))


@pytest.mark.parametrize("streaming", [True, False])
def test_stop_word_ends_the_generation_and_is_cut_from_text_and_ids(models, streaming):
    whole = text(ask(models[True], tensors(exclude_input_in_output=True)))
    word = whole[2:5]
    given = tensors(max_tokens=80, streaming=streaming, exclude_input_in_output=True)
    found = ask(models[True], {**given, "stop_words_list": words("zzz", word)})
    assert text(found) == whole[: whole.index(word)]
    assert len(ids(found)) <= 5
    # With the prompt in front, the cut is the same.
    if not streaming:
        (plain,) = ask(models[True], tensors(max_tokens=80, stop_words_list=words(word)))
        assert text([plain]) == PROMPT + whole[: whole.index(word)]


@pytest.mark.parametrize("streaming", [True, False])
def test_stop_ids_and_end_ids_never_show(models, streaming):
    free = ids(ask(models[True], tensors(exclude_input_in_output=True)))
    end = free[3]
    given = tensors(exclude_input_in_output=True, streaming=streaming, return_num_output_tokens=True)
    found = ask(models[True], {**given, "end_id": np.array([end], dtype=np.int32)})
    assert ids(found) == free[: free.index(end)]
    assert sum(int(r["num_output_tokens"][0, 0]) for r in found) == free.index(end)


def test_special_token_as_stop_word_is_an_end_id(models):
    given = tensors(stop_words_list=np.array([[[3], [1]]], dtype=np.int32), exclude_input_in_output=True)
    assert len(ids(ask(models[True], given))) == 12
    mixed = np.array([[[3, 68], [2, -1]]], dtype=np.int32)
    assert "<|im_end|>a" in refusal(models[True], tensors(stop_words_list=mixed))


def test_batch_is_answered_row_by_row_as_single_runs(models):
    prompts = (PROMPT, "a", "naïve café")
    alone = [ask(models[True], tensors((p,), exclude_input_in_output=True)) for p in prompts]
    for streaming in (False, True):
        found = ask(models[True], tensors(prompts, exclude_input_in_output=True, streaming=streaming))
        for row in range(3):
            mine = [r for r in found if r["batch_index"].tolist() == [[row]]]
            assert text(mine) == text(alone[row])
    (packed,) = ask(models[False], tensors(prompts, exclude_input_in_output=True))
    assert [t.decode() for t in packed["output_text"][:, 0]] == [text(a) for a in alone]
    assert packed["output_ids"].shape == (3, 1, 12)


def test_several_sequences_are_tagged(models):
    given = tensors(num_return_sequences=3, runtime_top_p=1.0, seed=5, exclude_input_in_output=True)
    found = sorted(ask(models[True], given), key=lambda r: int(r["sequence_index"][0, 0]))
    assert [int(r["sequence_index"][0, 0]) for r in found] == [0, 1, 2]
    for index, answer in enumerate(found):
        single = tensors(runtime_top_p=1.0, seed=5 + index, exclude_input_in_output=True)
        assert text([answer]) == text(ask(models[True], single))
    (packed,) = ask(models[False], given)
    assert [t.decode() for t in packed["output_text"][0]] == [text([r]) for r in found]


def test_beams_come_in_one_response(models):
    given = tensors(beam_width=3, return_log_probs=True, exclude_input_in_output=True, max_tokens=5)
    (found,) = ask(models[True], given)
    assert found["output_ids"].shape == (1, 3, 5)
    assert found["output_log_probs"].shape == (1, 3, 5)
    assert found["cum_log_probs"][0] == pytest.approx(found["output_log_probs"][0].sum(-1), abs=1e-4)
    assert found["cum_log_probs"][0].tolist() == sorted(found["cum_log_probs"][0].tolist(), reverse=True)


def test_log_probs_of_a_stream_add_up(models):
    (whole,) = ask(models[True], tensors(return_log_probs=True))
    stream = ask(models[True], tensors(return_log_probs=True, streaming=True))
    each = [float(p) for r in stream for p in r["output_log_probs"][0, 0]]
    assert each == pytest.approx(whole["output_log_probs"][0, 0].tolist(), abs=1e-3)
    assert float(stream[-1]["cum_log_probs"][0, 0]) == pytest.approx(sum(each), abs=1e-3)
    assert float(whole["cum_log_probs"][0, 0]) == pytest.approx(sum(each), abs=1e-3)


def test_counts_and_metrics_only_on_request(models):
    (plain,) = ask(models[True], tensors())
    assert set(plain) == {"output_ids", "sequence_length", "output_text", "batch_index", "sequence_index"}
    flags = dict.fromkeys(("return_num_input_tokens", "return_num_output_tokens", "return_perf_metrics"), True)
    (found,) = ask(models[True], tensors(**flags))
    prompt = len(TOKENIZER.encode(PROMPT, add_special_tokens=False).ids)
    assert found["num_input_tokens"].tolist() == [[prompt]]
    assert found["num_output_tokens"].tolist() == [[12]]
    times = [int(found[f"{n}_time_ns"][0, 0]) for n in ("arrival", "first_scheduled", "first_token", "last_token")]
    assert times == sorted(times)
    assert times[0] > 0


def test_only_requested_outputs_are_made(models):
    (found,) = finish(begin(models[True], tensors(), requested=("output_text",)))
    assert set(found.arrays()) == {"output_text"}


@pytest.mark.parametrize(
    ("extra", "wanted"),
    [
        ({"bad_words_list": words("foo")}, ["bad_words_list", "bad_words", "openvino", "tensorrt"]),
        ({"draft_input_ids": np.array([[1]], dtype=np.int32)}, ["draft_input_ids"]),
        ({"return_context_logits": True}, ["return_context_logits"]),
        ({"embedding_bias": np.ones((1, 320), dtype=np.float32)}, ["embedding_bias"]),
        ({"beam_width": 2, "streaming": True}, ["streaming", "beam_width 2"]),
        ({"beam_width": 5}, ["5", "4"]),
        ({"beam_width": 0}, ["beam_width is 0", "at least 1"]),
        ({"num_return_sequences": 0}, ["num_return_sequences is 0", "at least 1"]),
        ({"beam_width": 2, "num_return_sequences": 2}, ["num_return_sequences"]),
        ({"max_tokens": 0}, ["max_tokens is 0"]),
        ({"prompts": ("a " * 80,)}, ["max_input_len is 64"]),
        ({"prompts": ("",)}, ["no tokens"]),
        ({"input_ids": np.array([[5, 320]], dtype=np.int32), "input_lengths": 2}, ["320", "319"]),
        ({"input_lengths": 99}, ["99"]),
    ],
)
def test_refused_by_name(models, extra, wanted):
    message = refusal(models[True], tensors(**extra))
    for word in wanted:
        assert word in message


def test_neutral_values_of_refused_inputs_pass(models):
    given = tensors(
        return_context_logits=False,
        embedding_bias=np.zeros((1, 0), dtype=np.float32),
        bad_words_list=np.zeros((1, 2, 0), dtype=np.int32),
        stop_words_list=np.zeros((1, 2, 0), dtype=np.int32),
        decoder_input_ids=np.array([[7]], dtype=np.int32),
        decoder_input_lengths=1,
        pad_id=7,
    )
    assert len(ids(ask(models[True], given))) > 12


def test_streaming_needs_a_decoupled_model(models):
    assert "serve.streaming" in refusal(models[False], tensors(streaming=True))


@pytest.mark.parametrize("decoupled", [True, False])
def test_warm_up_gets_an_empty_answer(models, decoupled):
    zeros = {
        "input_ids": np.zeros((1, 8), dtype=np.int32),
        "input_lengths": np.zeros(1, dtype=np.int32),
        "request_output_len": np.zeros(1, dtype=np.int32),
    }
    responses = finish(begin(models[decoupled], zeros))
    assert [r.arrays() for r in responses] == ([] if decoupled else [{}])


STOP = {
    "input_ids": np.zeros((1, 1), dtype=np.int32),
    "input_lengths": np.zeros(1, dtype=np.int32),
    "request_output_len": np.zeros(1, dtype=np.int32),
    "stop": np.array([True]),
}


def test_stop_request_ends_the_one_with_the_same_id(models):
    running = begin(models[True], tensors(max_tokens=90, streaming=True), "abc")
    assert ask(models[True], STOP, "abc") == []
    assert len(ids([r.arrays() for r in finish(running)])) < 90
    assert "request id" in refusal(models[True], STOP)


def test_cancelled_by_triton_reaches_the_engine(models):
    sender = begin(models[True], tensors(max_tokens=90, streaming=True))
    sender.cancelled = True
    finish(sender)
    deadline = time.monotonic() + 5
    while models[True]._answers and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not models[True]._answers


def test_a_dead_engine_is_an_error_never_silence(models):
    process = models[True]._engine._process
    sender = begin(models[True], tensors(max_tokens=90, streaming=True))
    os.kill(process.pid, signal.SIGKILL)
    responses = finish(sender)
    if responses[-1].has_error():  # the tiny engine may have been faster than the signal
        assert "engine host" in responses[-1].error().message()
    process.wait(10)
    while models[True]._engine._socket is not None:
        time.sleep(0.01)
    assert text(ask(models[True], tensors(exclude_input_in_output=True)))


def gone(*_arguments, **_options):
    raise RuntimeError("the response factory is gone")


def until_forgotten(model):
    deadline = time.monotonic() + 5
    while model._answers and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not model._answers


def test_an_answer_that_cannot_be_sent_ends_nobody_elses(models, monkeypatch):
    model = models[True]
    whole = text(ask(model, tensors(exclude_input_in_output=True)))
    broken = [begin(model, tensors(streaming=True)) for _ in range(2)]
    broken[0].send = gone
    monkeypatch.setattr(broken[1], "is_cancelled", gone)
    assert text(ask(model, tensors(exclude_input_in_output=True))) == whole
    broken[1].final.wait(10)
    until_forgotten(model)
    other = begin(model, tensors(max_tokens=90, streaming=True))
    other.cancelled = True
    finish(other)
    until_forgotten(model)


def test_a_request_that_cannot_be_handed_over_is_answered_once(models, monkeypatch):
    def full(_message, _handler):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(models[True]._engine, "add", full)
    sender = begin(models[True], tensors())
    time.sleep(0.1)  # the watcher of cancellations looks every 20 ms
    (response,) = finish(sender)
    assert "No space left" in response.error().message()
    until_forgotten(models[True])


# --- preprocessing and postprocessing ---------------------------------------------------------------------------------


def prepare(repository, inputs, **parameters):
    model = start("preprocessing", repository, model_config(**parameters))
    (response,) = model.execute([pb.InferenceRequest([pb.Tensor(n, v) for n, v in inputs.items()])])
    return response


def query(*texts, **extra):
    return {
        "QUERY": np.array([[t.encode()] for t in texts], dtype=object),
        "REQUEST_OUTPUT_LEN": np.full((len(texts), 1), 5, dtype=np.int32),
        **extra,
    }


def test_prompts_are_padded_on_the_right(repository):
    found = prepare(repository, query("the word", "a"), add_special_tokens="false").arrays()
    rows = [TOKENIZER.encode(t, add_special_tokens=False).ids for t in ("the word", "a")]
    assert found["REQUEST_INPUT_LEN"].tolist() == [[len(row)] for row in rows]
    for row, expected in enumerate(rows):
        assert found["INPUT_ID"][row].tolist() == expected + [0] * (len(rows[0]) - len(expected))
    assert found["REQUEST_OUTPUT_LEN"].tolist() == [[5], [5]]
    assert found["EMBEDDING_BIAS"].shape == (2, 0)


def test_end_and_pad_ids_of_the_model_or_the_request(repository):
    generation = json.loads((CASES / "stream_bytes" / "generation_config.json").read_text())
    end = generation["eos_token_id"]
    found = prepare(repository, query("a")).arrays()
    assert found["OUT_END_ID"].tolist() == [[end[0] if isinstance(end, list) else end]]
    assert found["OUT_PAD_ID"].tolist() == [[0]]
    given = query("a", END_ID=np.array([[-1]], dtype=np.int32), PAD_ID=np.array([[9]], dtype=np.int32))
    found = prepare(repository, given).arrays()
    assert (found["OUT_END_ID"].tolist(), found["OUT_PAD_ID"].tolist()) == ([[-1]], [[9]])


def test_word_lists_have_the_official_layout_without_bos(repository):
    wanted = np.array([[b"fox", b"", b"the word"]], dtype=object)
    found = prepare(repository, query("a", STOP_WORDS_DICT=wanted)).arrays()["STOP_WORDS_IDS"]
    rows = [TOKENIZER.encode(t, add_special_tokens=False).ids for t in ("fox", "the word")]
    flat = rows[0] + rows[1]
    assert found.tolist() == [[flat, [len(rows[0]), len(flat)] + [-1] * (len(flat) - 2)]]
    empty = prepare(repository, query("a", BAD_WORDS_DICT=np.array([[b""]], dtype=object))).arrays()
    assert empty["BAD_WORDS_IDS"].shape == (1, 2, 0)


def test_stop_words_of_a_sentencepiece_tokenizer_read_back(tmp_path):
    (tmp_path / "1").mkdir()
    shutil.copytree(CASES / "stream_spaces", tmp_path / "1" / "tokenizer")
    from detokenizer import Vocabulary, decode
    from request_inputs import word_lists

    wanted = ["wn f", " fox", "fox", "  two"]
    given = query("a", STOP_WORDS_DICT=np.array([[w.encode() for w in wanted]], dtype=object))
    found = prepare(tmp_path, given).arrays()["STOP_WORDS_IDS"]
    vocabulary = Vocabulary.load(tmp_path / "1" / "tokenizer")
    assert [decode(vocabulary, word) for word in word_lists(found[0])] == wanted


def test_embedding_bias_of_words(repository):
    given = query(
        "a",
        EMBEDDING_BIAS_WORDS=np.array([[b"a"]], dtype=object),
        EMBEDDING_BIAS_WEIGHTS=np.array([[2.5]], dtype=np.float32),
    )
    bias = prepare(repository, given).arrays()["EMBEDDING_BIAS"]
    (index,) = TOKENIZER.encode("a", add_special_tokens=False).ids
    assert bias.shape == (1, 320)
    assert bias[0, index] == 2.5
    assert bias.sum() == 2.5


@pytest.mark.parametrize(("length", "prompt"), [(0, "a"), (-1, "a"), (-1, "")])
def test_max_tokens_below_one_is_refused(repository, length, prompt):
    given = {**query(prompt), "REQUEST_OUTPUT_LEN": np.array([[length]], dtype=np.int32)}
    assert f"max_tokens is {length}" in prepare(repository, given).error().message()


def test_warm_up_of_preprocessing(repository):
    given = {**query(""), "REQUEST_OUTPUT_LEN": np.array([[0]], dtype=np.int32)}
    assert not prepare(repository, given).has_error()


def test_postprocessing_passes_exact_text_on_or_decodes(repository):
    model = start("postprocessing", repository, model_config())
    rows = TOKENIZER.encode("naïve", add_special_tokens=False).ids
    given = {
        "TOKENS_BATCH": np.array([[[*rows, 0], [68, 0, 0] + [0] * (len(rows) - 2)]], dtype=np.int32),
        "SEQUENCE_LENGTH": np.array([[len(rows), 1]], dtype=np.int32),
    }
    decoded = model.execute([pb.InferenceRequest([pb.Tensor(n, v) for n, v in given.items()])])[0].arrays()["OUTPUT"]
    assert decoded.tolist() == ["naïve".encode(), b"a"]
    given["OUTPUT_TEXT"] = np.array([[b"x", b"y"]], dtype=object)
    passed = model.execute([pb.InferenceRequest([pb.Tensor(n, v) for n, v in given.items()])])[0].arrays()["OUTPUT"]
    assert passed.tolist() == [b"x", b"y"]


def test_contents_name_every_module_that_a_model_imports():
    contents = json.loads((MODEL_REPO / "contents.json").read_text())
    everything = {p.relative_to(MODEL_REPO).as_posix(): p for p in MODEL_REPO.rglob("*.py")}
    by_module = {p.stem: name for name, p in everything.items() if p.stem != "model"}
    for model, files in contents.items():
        for name in files:
            assert (MODEL_REPO / name).is_file(), name
            if not name.endswith(".py"):
                continue
            for line in (MODEL_REPO / name).read_text().splitlines():
                parts = line.split()
                if parts[:1] in (["from"], ["import"]) and parts[1] in by_module:
                    assert by_module[parts[1]] in files, f"{model}: {name} imports {parts[1]}"


def test_one_request_ends_with_an_error_and_the_others_of_its_batch_do_not(repository, monkeypatch):
    model = start("preprocessing", repository, model_config())
    encode = model._tokenizer.encode

    def failing(text, **options):
        if text == "boom":
            raise RuntimeError("tokenizer failed")
        return encode(text, **options)

    monkeypatch.setattr(model._tokenizer, "encode", failing)
    requests = [pb.InferenceRequest([pb.Tensor(n, v) for n, v in query(t).items()]) for t in ("the", "boom", "word")]
    good, bad, last = model.execute(requests)
    assert not good.has_error()
    assert not last.has_error()
    assert "tokenizer failed" in bad.error().message()
    model = start("postprocessing", repository, model_config())
    ids, lengths = pb.Tensor("TOKENS_BATCH", np.ones((1, 1, 1), np.int32)), np.ones((1, 1), np.int32)
    requests = [pb.InferenceRequest([ids]), pb.InferenceRequest([ids, pb.Tensor("SEQUENCE_LENGTH", lengths)])]
    assert [response.has_error() for response in model.execute(requests)] == [True, False]


@pytest.mark.parametrize("decoupled", [True, False])
def test_a_bls_stream_whose_step_cannot_be_called_ends_with_an_error(monkeypatch, decoupled):
    class Call:
        def __init__(self, **_options):
            pass

        def exec(self, **_options):
            raise pb.TritonModelException("model 'preprocessing' is not ready")

    request = pb.InferenceRequest([pb.Tensor("text_input", np.array([[b"a"]], dtype=object))])
    module = load_model("tensorrt_llm_bls")
    model = module.TritonPythonModel()
    model.initialize({"model_config": json.dumps(model_config(decoupled=decoupled))})
    monkeypatch.setattr(pb, "InferenceRequest", Call)
    answer = model.execute([request])
    (response,) = finish(request.sender) if decoupled else answer
    assert "is not ready" in response.error().message()
