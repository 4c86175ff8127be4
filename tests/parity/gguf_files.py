"""Vocabularies for GGUF files made in tests, and reading of what lpx made of a file."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from lpxbuild.output import Output
from lpxbuild.source import Source, check, fetch

CORPUS = [
    "the quick brown fox jumps over the lazy dog and the quick brown fox sleeps",
    "    return a + b\n    if x == 12345:\n        print('hello world')",
    "你好世界 今天天气很好 我们去公园吧",
    "naïve café, Größe; 👩\u200d👧 🙂 — it's 3.14 and don't you'll",
]
LINES = [
    *CORPUS,
    "the  quick   brown",
    "   leading and trailing   ",
    "<s>[INST] hi [/INST]</s> the",
    "",
    "世界世界 12  345",
    "\tI'll\r\n",
    "<0x41> ▁ the",
    "\u00a0\u3000é\u0301",
]


def sentence_piece_vocabulary(writer, special: tuple[str, ...] = ()) -> list[str]:
    """Pieces with scores as SentencePiece's BPE has them: merges are not in the file."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer

    trained = Tokenizer(BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(CORPUS * 3, BpeTrainer(vocab_size=220, show_progress=False))
    pieces = sorted(trained.get_vocab(), key=trained.token_to_id)
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, *special]
    first = 3 + 256
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores([0.0] * first + [float(-index) for index in range(len(pieces))] + [0.0] * len(special))
    writer.add_token_types([2, 3, 3] + [6] * 256 + [1] * len(pieces) + [3] * len(special))
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    return tokens


def byte_level_vocabulary(writer, pre: str | None) -> list[str]:
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers.models import BPE
    from tokenizers.trainers import BpeTrainer

    trained = Tokenizer(BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(CORPUS * 3, BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False))
    merges = json.loads(trained.to_str())["model"]["merges"]
    tokens = [*sorted(trained.get_vocab(), key=trained.token_to_id), "<|begin|>", "<|end|>", "<|turn|>", "<tool>"]
    writer.add_tokenizer_model("gpt2")
    if pre is not None:
        writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_merges([" ".join(pair) if isinstance(pair, list) else pair for pair in merges])
    writer.add_token_types([1] * (len(tokens) - 4) + [3, 3, 3, 4])
    writer.add_bos_token_id(len(tokens) - 4)
    writer.add_eos_token_id(len(tokens) - 3)
    writer.add_eot_token_id(len(tokens) - 2)
    return tokens


def converted(file: Path, **options) -> Source:
    folder = file.with_suffix("")
    fetch(str(file), None, destination=folder, output=Output.quiet(), **options)
    return check(folder, origin=str(file), need_tokenizer=True, output=Output.quiet())


def tokenizer_of(source: Source):
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(source.path / "tokenizer.json"))


def sums_of(source: Source, dtype: str) -> dict[str, str]:
    return {f"{name} {dtype}": hashlib.sha256(read(source, name)).hexdigest() for name in source.tensors}


def read(source: Source, name: str) -> bytes:
    entry = source.tensors[name]
    with entry.file.open("rb") as file:
        file.seek(entry.begin)
        return file.read(entry.nbytes)


def values(source: Source, name: str) -> np.ndarray:
    return np.frombuffer(read(source, name), np.float32).reshape(source.tensors[name].shape)
