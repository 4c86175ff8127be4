"""Tokenizer and special ids: what ends a generation, what pads, which ids the model has no row for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lpxbuild.errors import SourceError
from lpxbuild.source.folder import SLOW_TOKENIZER_FILES, TOKENIZER, read_json


@dataclass(frozen=True)
class SpecialIds:
    """Ids that serving needs; `end` is the whole set, `pad` is always a valid id."""

    end: tuple[int, ...]
    pad: int
    bos: int | None
    notices: tuple[str, ...]


def read_vocabulary(path: Path, *, need_tokenizer: bool) -> dict[str, int] | None:
    """Token → id of tokenizer.json, added tokens included; None without one.

    Raises:
        SourceError: tokenizer.json is needed and absent, or this version of `tokenizers` cannot read it.
    """
    file = path / TOKENIZER
    if not file.is_file():
        if not need_tokenizer:
            return None
        slow = [name for name in SLOW_TOKENIZER_FILES if (path / name).is_file()]
        found = f"the folder has only {', '.join(slow)}" if slow else "the folder has no tokenizer files at all"
        raise SourceError(
            f"{path} has no {TOKENIZER}, so nothing can turn text into the model's tokens",
            why=found,
            next="save it once with transformers: "
            f"AutoTokenizer.from_pretrained(MODEL).save_pretrained({str(path)!r}); "
            "or, with a format that needs no calibration, stop before a tokenizer is needed: lpx build --to checkpoint",
        )
    settings = read_json(file)
    if need_tokenizer:
        _check_loads(file)
    try:
        return _token_ids(settings)
    except (KeyError, TypeError, IndexError):
        raise SourceError(
            f"{file} is not a tokenizer: an entry of its vocabulary has no token or no id",
            why="the file is broken",
            next="fetch the file again",
        ) from None


def check_vocabulary(vocabulary: Mapping[str, int], vocab_size: int) -> list[str]:
    """A notice where the tokenizer makes ids that the embedding has no row for; more rows than tokens are fine."""
    beyond = sorted((id_, token) for token, id_ in vocabulary.items() if id_ >= vocab_size)
    if not beyond:
        return []
    shown = ", ".join(f"{token!r} (id {id_})" for id_, token in beyond[:5])
    more = f" and {len(beyond) - 5} more" if len(beyond) > 5 else ""
    return [
        f"the tokenizer has tokens beyond vocab_size {vocab_size}: {shown}{more}; "
        "the model has no row for them, requests that contain them are refused"
    ]


def special_ids(
    path: Path,
    config: Mapping[str, Any],
    generation_config: Mapping[str, Any],
    vocabulary: Mapping[str, int] | None,
    vocab_size: int,
) -> SpecialIds:
    """End, pad and begin ids.

    generation_config.json decides, as in transformers' `generate`; config.json answers where it is silent. The
    tokenizer's own eos_token is added, because chat fine-tunes often name their terminator only there.

    Raises:
        SourceError: an id is not a whole number, or has no row in the embedding.
    """
    tokenizer_config = read_json(path / "tokenizer_config.json") if (path / "tokenizer_config.json").is_file() else {}
    notices: list[str] = []
    end = _ids("eos_token_id", generation_config) or _ids("eos_token_id", config)
    eos = _token_id(tokenizer_config.get("eos_token"), vocabulary)
    if eos is not None and eos < vocab_size and eos not in end:
        if end:
            notices.append(f"tokenizer_config.json names another end token, id {eos}: it ends a generation as well")
        end = (*end, eos)
    if not end:
        notices.append("no end token is named anywhere: a generation ends only at max_tokens or at a stop word")
    pads = _ids("pad_token_id", generation_config) or _ids("pad_token_id", config)
    named_pad = _token_id(tokenizer_config.get("pad_token"), vocabulary)
    if not pads and named_pad is not None and named_pad < vocab_size:
        pads = (named_pad,)
    begin = _ids("bos_token_id", generation_config) or _ids("bos_token_id", config)
    for key, ids in (("eos_token_id", end), ("pad_token_id", pads), ("bos_token_id", begin)):
        for id_ in ids:
            if id_ >= vocab_size:
                raise SourceError(
                    f"{key} is {id_}, but vocab_size is {vocab_size}",
                    why="the model has no such token",
                    next="correct generation_config.json or config.json",
                )
    return SpecialIds(end, (*pads, *end, 0)[0], begin[0] if begin else None, tuple(notices))


def _ids(key: str, config: Mapping[str, Any]) -> tuple[int, ...]:
    """One id or a list of them; null and -1 (Llama's old way to say none) count as absent."""
    value = config.get(key)
    values = value if isinstance(value, list) else [value]
    ids: dict[int, None] = {}
    for item in values:
        if item is None or item == -1:
            continue
        if type(item) is not int or item < 0:
            raise SourceError(
                f"{key} is {value!r}",
                why="expected a token id or a list of them",
                next=f"set {key} in config.json or generation_config.json to an id of the vocabulary",
            )
        ids[item] = None
    return tuple(ids)


def _token_id(token: Any, vocabulary: Mapping[str, int] | None) -> int | None:
    text = token.get("content") if isinstance(token, dict) else token
    return vocabulary.get(text) if vocabulary is not None and isinstance(text, str) else None


def _token_ids(settings: Mapping[str, Any]) -> dict[str, int]:
    model = settings.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    ids: dict[str, int] = {}
    if isinstance(vocabulary, dict):
        ids.update(vocabulary)
    elif isinstance(vocabulary, list):  # Unigram: a list of [token, score]
        ids.update({item[0]: index for index, item in enumerate(vocabulary)})
    for token in settings.get("added_tokens") or ():
        ids[token["content"]] = token["id"]
    if not all(type(id_) is int for id_ in ids.values()):
        raise TypeError
    return ids


def _check_loads(file: Path) -> None:
    import tokenizers

    try:
        tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception for whatever it cannot parse
        raise SourceError(
            f"{file} cannot be read by tokenizers {tokenizers.__version__}: {error}",
            why="the file is broken, or was written by a newer version of tokenizers",
            next="pip install --upgrade tokenizers, or save the tokenizer again with the installed version",
        ) from None
