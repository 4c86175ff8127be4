"""Everything that can be known to be wrong before a weight is read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from lpxbuild.families import Family, check_parallel, family_for
from lpxbuild.output import Output
from lpxbuild.quantization.formats import Layout
from lpxbuild.quantization.scheme import Scheme
from lpxbuild.source.code import check_code, code_files
from lpxbuild.source.folder import (
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    QUANTIZATION_FILES,
    WEIGHTS,
    download_command,
    read_config,
    read_json,
    read_tensors,
    tokenizer_files,
)
from lpxbuild.source.quantized import (
    Settings,
    check_contents,
    check_settings,
    check_use,
    read_quantization,
    settings_of,
)
from lpxbuild.source.records import Source, SourceFile
from lpxbuild.source.tokens import check_vocabulary, read_vocabulary, special_ids
from lpxbuild.source.weights import check_tied_head, dtype_notices, match_tensors, stored_dtype, with_prefix

CONTENTS = 32 << 20
"""Bytes of zero points and group orders of a quantized source that are looked at here: enough for the first layers of
the largest models, a moment even from a slow disk. Whoever quantized one layer so did it to all; the conversion looks
at the rest."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_SHA256 = re.compile(r"[0-9a-f]{64}")


def check(
    path: Path,
    *,
    origin: str,
    revision: str | None = None,
    need_tokenizer: bool = True,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    layout: Layout | None = None,
    scheme: Scheme | None = None,
    backend: str | None = None,
    output: Output,
) -> Source:
    """Check a Hugging Face folder as a whole: config, index, headers, shapes, dtypes, tokenizer, special ids.

    Cheap questions come first, so that a refusal takes well under two seconds. No weight is read, except to compare
    a redundant lm_head with the embedding of a tied model, and the zero points and group orders of GPTQ files.

    Args:
        path: the folder, as `fetch` returned it.
        origin: what the recipe calls the source; shown in commands.
        revision: the commit, where the caller knows it; else it is taken from the hub's own records beside the files.
        need_tokenizer: False for builds that stop at the checkpoint.
        layout: the checkpoint that is to be made of it; decides what a source that is quantized already may be.
        scheme: the quantization that the recipe asks for; None = the source's own, or none.
        backend: who is to execute it; decides whether a quantized source's own format will do.

    Raises:
        SourceError: names file, tensor or key, what was expected and found, and what to do.
    """
    path = Path(path)
    config, settings, family = check_config(
        path,
        tensor_parallel=tensor_parallel,
        pipeline_parallel=pipeline_parallel,
        layout=layout,
        scheme=scheme,
        backend=backend,
    )
    generation_config = read_json(path / GENERATION_CONFIG) if (path / GENERATION_CONFIG).is_file() else {}

    revision = hub_revision(path) or revision
    found, weight_files = read_tensors(path, origin, revision)
    shape = family.model_shape(config, stored_dtype=stored_dtype(found))
    download = download_command(path, origin, INDEX if (path / INDEX).is_file() else WEIGHTS, revision)
    quantization = None
    if settings is not None:
        quantization = read_quantization(settings, family, shape, with_prefix(found, family))
    tensors, notices = match_tensors(found, family, shape, download=download, quantization=quantization)
    stored = quantization.expected if quantization is not None else {}
    notices += dtype_notices({name: entry for name, entry in tensors.items() if name not in stored}, shape)
    if quantization is not None:
        check_use(
            quantization,
            family,
            shape,
            layout=layout,
            scheme=scheme,
            backend=backend,
            tensor_parallel=tensor_parallel,
        )
        if layout is not None:
            from lpxbuild.source.quantized.arrays import mapped

            check_contents(quantization, mapped(tensors), most_bytes=CONTENTS)
        notices += quantization.notices

    vocabulary = read_vocabulary(path, need_tokenizer=need_tokenizer)
    if vocabulary is not None:
        notices += check_vocabulary(vocabulary, shape.vocab_size)
    ids = special_ids(path, config, generation_config, vocabulary, shape.vocab_size)
    notices += ids.notices
    if shape.tie_word_embeddings:
        check_tied_head(tensors, family)

    for notice in notices:
        output.notice(notice)
    jsons = [path / n for n in (CONFIG, GENERATION_CONFIG, INDEX, *QUANTIZATION_FILES) if (path / n).is_file()]
    return Source(
        path=path,
        origin=origin,
        revision=revision,
        files=tuple(
            SourceFile(file.name, file.stat().st_size, hub_sha256(file))
            for file in sorted({*jsons, *weight_files, *tokenizer_files(path), *code_files(path)})
        ),
        config=config,
        generation_config=generation_config,
        shape=shape,
        tensors=tensors,
        end_ids=ids.end,
        pad_id=ids.pad,
        bos_id=ids.bos,
        notices=tuple(notices),
        quantization=quantization,
    )


def check_config(
    path: Path,
    *,
    tensor_parallel: int = 1,
    pipeline_parallel: int = 1,
    layout: Layout | None = None,
    scheme: Scheme | None = None,
    backend: str | None = None,
) -> tuple[dict[str, Any], Settings | None, Family]:
    """What `check` can refuse by the small JSON files alone, as before gigabytes are downloaded.

    Returns:
        config.json, what it says of a quantization, and the family.

    Raises:
        SourceError: as `check`.
    """
    config = read_config(path)
    settings = settings_of(path, config)
    family = family_for(config)
    shape = family.model_shape(config)
    check_parallel(shape, tensor_parallel, pipeline_parallel, layout=layout)
    if layout == "unified_hf":
        check_code(path, family)
    if settings is not None:
        check_settings(settings, family, shape, layout=layout, scheme=scheme, backend=backend)
    return config, settings, family


def hub_revision(path: Path) -> str | None:
    """The commit that huggingface_hub recorded for a folder, None for a folder that it did not make."""
    if path.parent.name == "snapshots" and _COMMIT.fullmatch(path.name):
        return path.name
    recorded = _local_record(path / CONFIG)
    return recorded[0] if recorded and _COMMIT.fullmatch(recorded[0]) else None


def hub_sha256(file: Path) -> str | None:
    """SHA-256 of a file stored by LFS or Xet, from the hub's records; None where they have none or do not fit.

    huggingface_hub names a blob in its cache by the hash; beside a plain folder's files it keeps `commit, etag, time`.
    """
    if file.is_symlink():
        blob = file.readlink()  # not resolve(): newer versions link blobs on into a store that names them otherwise
        return blob.name if blob.parent.name == "blobs" and _SHA256.fullmatch(blob.name) else None
    recorded = _local_record(file)
    if recorded is None or not _SHA256.fullmatch(recorded[1]):
        return None
    # The library's own rule: a file changed after the record was written is no longer the one downloaded.
    return recorded[1] if file.stat().st_mtime <= float(recorded[2]) + 1 else None


def _local_record(file: Path) -> tuple[str, str, str] | None:
    record = file.parent / ".cache" / "huggingface" / "download" / f"{file.name}.metadata"
    try:
        commit, etag, time = record.read_text().splitlines()[:3]
        float(time)
    except (OSError, ValueError):
        return None
    return commit, etag, time
