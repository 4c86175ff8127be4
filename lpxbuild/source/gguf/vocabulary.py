"""tokenizer.json from the vocabulary in a GGUF file.

The ids equal those of transformers' GGUF loader (4.57), which tests/parity/test_gguf.py checks line by line. Where that
loader departs from the model's own tokenizer, this module follows the model: user-defined tokens are kept whole, bos is
added only where the file says so, and the split patterns of Llama 3 and Mistral Nemo are their own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lpxbuild.errors import SourceError
from lpxbuild.source.gguf.metadata import Metadata

if TYPE_CHECKING:
    from tokenizers import Tokenizer

CONTROL, USER_DEFINED = 3, 4  # tokenizer.ggml.token_type


@dataclass(frozen=True)
class Split:
    """How a byte-level vocabulary cuts text before it merges: a value of `tokenizer.ggml.pre`.

    Attributes:
        pattern: None = GPT-2's, which the tokenizers library has built in.
        begins: bos is added where the file says nothing.
        whole_words: a piece that is a token is taken without merging.
        composed: text is brought to Unicode's NFC first.
    """

    pattern: str | None = None
    begins: bool = False
    whole_words: bool = False
    composed: bool = False


# From the tokenizer.json of Llama 3, Mistral Nemo, Qwen2 and GPT-4o; llama.cpp (src/llama-vocab.cpp) has the same.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_END = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_BEFORE, _SUFFIX = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_TEKKEN = rf"{_BEFORE}{_UPPER}*{_LOWER}+|{_BEFORE}{_UPPER}+{_LOWER}*|\p{{N}}{_END}"
_GPT4O = rf"{_BEFORE}{_UPPER}*{_LOWER}+{_SUFFIX}|{_BEFORE}{_UPPER}+{_LOWER}*{_SUFFIX}|\p{{N}}{{1,3}}{_END}"
SPLITS = {
    # `smollm` splits digits one by one before GPT-2's pattern; without merges of digits that changes ids only where
    # two or more blanks stand before a digit, and transformers' loader does not do it.
    **dict.fromkeys(("default", "gpt-2", "gpt2", "smollm"), Split()),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), Split(_LLAMA3, begins=True, whole_words=True)),
    "tekken": Split(_TEKKEN, begins=True, whole_words=True),
    "qwen2": Split(_QWEN2, composed=True),
    "dbrx": Split(_LLAMA3),  # Phi-4
    "gpt-4o": Split(_GPT4O),  # Phi-4 mini
}
# Phi-3's own tokens swallow the blanks and newlines that follow them, these three excepted; GGUF does not say it.
_PHI3_KEEPS_BLANKS = ("<unk>", "<s>", "<|endoftext|>")


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
    split = _split(metadata) if kind == "gpt2" else None
    model = _byte_level(metadata, tokens, special, split) if split else _sentence_piece(metadata, tokens, special)
    _add_tokens(model, metadata, tokens, special)
    begins = metadata.flag("tokenizer.ggml.add_bos_token", split is None or split.begins)
    ends = metadata.flag("tokenizer.ggml.add_eos_token", False)
    _add_template(model, special.get("bos_token") if begins else None, special.get("eos_token") if ends else None)
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.size(metadata.key("context_length")),
    }
    return BuiltTokenizer(model, config, special)


def _split(metadata: Metadata) -> Split:
    name = metadata.text("tokenizer.ggml.pre") or "default"
    if name not in SPLITS:
        raise _unknown(metadata, f"the split pattern {name!r} (tokenizer.ggml.pre)", ", ".join(SPLITS))
    return SPLITS[name]


def _byte_level(metadata: Metadata, tokens: list[str], special: dict[str, str], split: Split) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    tokenizer = Tokenizer(
        BPE(
            _ids(tokens),
            _merges(metadata) or [],
            unk_token=special.get("unk_token"),
            fuse_unk=True,
            ignore_merges=split.whole_words,
        )
    )
    if split.composed:
        tokenizer.normalizer = normalizers.NFC()
    if split.pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(split.pattern), behavior="isolated"),
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
    whole = [token for token, kind in zip(tokens, types) if kind == USER_DEFINED and token not in control]
    phi3 = metadata.architecture == "phi3" and metadata.text("tokenizer.ggml.model") == "llama"

    def added(token: str, *, special: bool) -> AddedToken:
        strips = phi3 and token not in _PHI3_KEEPS_BLANKS
        return AddedToken(token, special=special, normalized=False, rstrip=strips)

    tokenizer.add_special_tokens([added(token, special=True) for token in control])
    tokenizer.add_tokens([added(token, special=False) for token in whole])


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
