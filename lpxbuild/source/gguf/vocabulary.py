"""tokenizer.json from the vocabulary in a GGUF file.

The ids equal those of transformers' GGUF loader (4.57), which tests/parity/test_gguf.py checks line by line. Where that
loader departs from the model's own tokenizer, this module follows the model: user-defined tokens are kept whole, bos is
added only where the file says so, and the split patterns of Llama 3 and Mistral Nemo are their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lpxbuild.errors import SourceError
from lpxbuild.source.gguf.metadata import ARCHITECTURE, Metadata

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
# GPT-2's pattern is what the tokenizers library has built in. `smollm` splits digits one by one before it; without
# merges of digits that changes ids only where two or more blanks stand before a digit, and transformers' loader
# does not do it.
GPT2_PATTERNS = ("default", "gpt-2", "gpt2", "smollm")
# From the tokenizer.json of Llama 3 and of Mistral Nemo; llama.cpp (src/llama-vocab.cpp) has the same.
SPLIT_PATTERNS = {
    "llama-bpe": r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
    "tekken": r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
}
SPLIT_PATTERNS["llama3"] = SPLIT_PATTERNS["llama-v3"] = SPLIT_PATTERNS["llama-bpe"]


@dataclass(frozen=True)
class BuiltTokenizer:
    """The tokenizer and the two JSON files beside it."""

    model: Tokenizer
    config: dict[str, Any]
    special_tokens: dict[str, str]


def build_tokenizer(metadata: Metadata, *, vocab_size: int) -> BuiltTokenizer:
    """The tokenizer of a GGUF file with a byte-level BPE (`gpt2`) or a SentencePiece BPE (`llama`) vocabulary.

    Args:
        metadata: of the file.
        vocab_size: rows of the embedding.

    Raises:
        SourceError: another kind of vocabulary, an unknown split pattern, more tokens than embedding rows.
    """
    tokens = metadata.array("tokenizer.ggml.tokens") or []
    kind = metadata.text("tokenizer.ggml.model")
    if not tokens or kind not in ("gpt2", "llama"):
        raise _unknown(metadata, f"a tokenizer of the kind {kind!r} with {len(tokens)} tokens", "gpt2 and llama")
    if len(tokens) > vocab_size:
        raise SourceError(
            f"{metadata.file.name} has {len(tokens)} tokens, but its embedding has {vocab_size} rows",
            why="the model has no row for the last tokens",
            next="download the file again, or give the Hugging Face folder of this model",
        )
    special = {
        f"{name}_token": tokens[id_]
        for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if (id_ := metadata.id(key)) is not None and 0 <= id_ < len(tokens)
    }
    pattern = metadata.text("tokenizer.ggml.pre")
    model = _byte_level(metadata, tokens, special) if kind == "gpt2" else _sentence_piece(metadata, tokens, special)
    _add_tokens(model, metadata, tokens, special)
    begins = metadata.flag("tokenizer.ggml.add_bos_token", kind == "llama" or pattern in SPLIT_PATTERNS)
    ends = metadata.flag("tokenizer.ggml.add_eos_token", False)
    _add_template(model, special.get("bos_token") if begins else None, special.get("eos_token") if ends else None)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.size(f"{ARCHITECTURE}.context_length"),
    }
    return BuiltTokenizer(model, config, special)


def _byte_level(metadata: Metadata, tokens: list[str], special: dict[str, str]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    pattern = metadata.text("tokenizer.ggml.pre") or "default"
    if pattern not in GPT2_PATTERNS and pattern not in SPLIT_PATTERNS:
        known = ", ".join((*GPT2_PATTERNS, *SPLIT_PATTERNS))
        raise _unknown(metadata, f"the split pattern {pattern!r} (tokenizer.ggml.pre)", known)
    split = SPLIT_PATTERNS.get(pattern)
    tokenizer = Tokenizer(
        BPE(
            _ids(tokens),
            _merges(metadata) or [],
            unk_token=special.get("unk_token"),
            fuse_unk=True,
            ignore_merges=split is not None,
        )
    )
    if split is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_piece(metadata: Metadata, tokens: list[str], special: dict[str, str]) -> Tokenizer:
    from tokenizers import Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    merges = _merges(metadata)
    if merges is None:
        scores = metadata.array("tokenizer.ggml.scores")
        if scores is None or len(scores) != len(tokens):
            raise _unknown(metadata, "neither merges nor a score for each token", "one of the two")
        merges = merges_from_scores(tokens, [float(score) for score in scores])
    tokenizer = Tokenizer(
        BPE(_ids(tokens), merges, unk_token=special.get("unk_token"), fuse_unk=True, byte_fallback=True)
    )
    prefix = metadata.flag("tokenizer.ggml.add_space_prefix", True)
    steps: list[Any] = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    strip: list[Any] = [decoders.Strip(content=" ", left=1)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def merges_from_scores(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Merge rules of a SentencePiece BPE, best first: every split of a piece into two pieces, by the piece's score.

    SentencePiece merges the pair whose result scores highest; splits of one piece go by the scores of their halves.
    """
    score_of = dict(zip(tokens, scores))
    rules: list[tuple[float, str, str]] = []
    for piece, score in score_of.items():
        splits = [
            (piece[:cut], piece[cut:])
            for cut in range(1, len(piece))
            if piece[:cut] in score_of and piece[cut:] in score_of
        ]
        splits.sort(key=lambda pair: (score_of[pair[0]], score_of[pair[1]]), reverse=True)
        rules.extend((score, left, right) for left, right in splits)
    rules.sort(key=lambda rule: rule[0], reverse=True)
    return [(left, right) for _score, left, right in rules]


def _merges(metadata: Metadata) -> list[tuple[str, str]] | None:
    lines = metadata.array("tokenizer.ggml.merges")
    if lines is None:
        return None
    merges = []
    for line in lines:
        left, _, right = line.partition(" ")
        merges.append((left, right))
    return merges


def _ids(tokens: list[str]) -> dict[str, int]:
    return {token: index for index, token in enumerate(tokens)}


def _add_tokens(tokenizer: Tokenizer, metadata: Metadata, tokens: list[str], special: dict[str, str]) -> None:
    from tokenizers import AddedToken

    types = metadata.array("tokenizer.ggml.token_type") or []
    control = [token for token, kind in zip(tokens, types) if kind == CONTROL]
    control += [token for token in special.values() if token not in control]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    whole = [token for token, kind in zip(tokens, types) if kind == USER_DEFINED and token not in control]
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in whole])


def _add_template(tokenizer: Tokenizer, bos: str | None, eos: str | None) -> None:
    from tokenizers import processors

    if bos is None and eos is None:
        return
    single = " ".join(part for part in (bos and f"{bos}:0", "$A:0", eos and f"{eos}:0") if part)
    pair = " ".join(part for part in (single, bos and f"{bos}:1", "$B:1", eos and f"{eos}:1") if part)
    used = [(token, tokenizer.token_to_id(token)) for token in dict.fromkeys((bos, eos)) if token]
    tokenizer.post_processor = processors.TemplateProcessing(single=single, pair=pair, special_tokens=used)


def _unknown(metadata: Metadata, found: str, known: str) -> SourceError:
    return SourceError(
        f"{metadata.file.name} has {found}",
        why=f"lpx knows {known}; a wrong guess would give other ids than the model was trained with",
        next="give the Hugging Face folder or hub id of this model",
    )
