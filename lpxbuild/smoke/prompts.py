"""The recipe's own prompts: rendered with the model's chat template, answered, compared with what is expected."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lpxbuild.shipped import shipped
from lpxbuild.smoke.registry import CheckFailed, SmokePrompt, Subject, require


def prompt_check(subject: Subject, prompt: SmokePrompt) -> str:
    """The greedy answer is not empty and holds `expect`."""
    text = prompt.text if prompt.text is not None else _rendered(subject, prompt)
    answer = subject.client.text(subject.greedy(text, prompt.max_tokens))
    require(bool(answer.strip()), f"the answer to {text!r} is empty: {answer!r}")
    if prompt.expect is not None:
        require(prompt.expect in answer, f"{prompt.expect!r} is not in the answer {answer!r}")
    return f"{answer!r}"


def _rendered(subject: Subject, prompt: SmokePrompt) -> str:
    if subject.repository is None:
        raise CheckFailed("a prompt with messages needs the repository: its tokenizer folder has the chat template")
    folder = Path(subject.repository) / "preprocessing" / "1" / "tokenizer"
    library = str(shipped("model_repo") / "text")
    # The same code that the models run on; it lies outside of this package, because it must run without it.
    sys.path.insert(0, library)
    try:
        import chat_template  # type: ignore[import-not-found]
        import tokenizer_files  # type: ignore[import-not-found]
    finally:
        sys.path.remove(library)
    tokenizer = tokenizer_files.TokenizerFolder(folder)
    template = chat_template.ChatTemplate.load(folder, tokenizer.special_tokens())
    if template is None:
        raise CheckFailed(f"a prompt has messages, but {folder} has no chat template")
    try:
        text = str(template.render(list(prompt.messages or ())))
    except chat_template.ChatTemplateError as error:
        raise CheckFailed(str(error)) from error
    return _without_double_bos(text, tokenizer, subject)


def _without_double_bos(text: str, tokenizer: Any, subject: Subject) -> str:
    """Leave the template's BOS to preprocessing where that adds one by itself."""
    from lpxbuild.server import checks

    parameters = checks.models(Path(subject.repository or "."))["preprocessing"].config.parameters
    adds = "add_special_tokens" in parameters and parameters["add_special_tokens"].string_value.lower() == "true"
    bos = tokenizer.special_tokens().get("bos_token")
    if adds and bos and text.startswith(bos):
        ids = tokenizer.encode(text, add_special_tokens=True)
        if ids[:1] == ids[1:2]:
            return text[len(bos) :]
    return text
