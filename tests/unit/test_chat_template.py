"""Chat templates rendered as transformers renders them, in a sandbox, with the template's own errors."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "standins"))
from served_modules import CASES

from chat_template import ChatTemplate, ChatTemplateError  # isort: skip
from tokenizer_files import TokenizerFolder  # isort: skip

REFERENCE_PYTHON = Path(__file__).resolve().parents[2] / ".venv-ref" / "bin" / "python"
USER = [{"role": "user", "content": "hi"}]
TEMPLATES = {
    "chatml": "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "blocks": "{{ bos_token }}\n{%- for m in messages %}\n    {% if m.role == 'user' %}\n  [INST] "
    "{{ m.content | trim }} [/INST]\n    {% else %}\n  {{ m.content }}{{ eos_token }}\n    {% endif %}\n{% endfor %}",
    "json": "{{ messages | tojson }}|{{ messages[0] | tojson(indent=2) }}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% if loop.index == 3 %}{% break %}{% endif %}{% endfor %}",
    "namespace": "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ m.role }}"
    "{% endfor %}{{ tools is none }}{{ unk_token is defined }}",
}
CONVERSATION = [
    {"role": "system", "content": "be <brief> & 'kind' 世界"},
    {"role": "user", "content": "  hi 🙂 "},
    {"role": "assistant", "content": "hello"},
    {"role": "user", "content": "bye"},
]
SCRIPT = """
import json, sys
from transformers import PreTrainedTokenizerFast
folder, templates, messages = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
def render(template):
    return tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, add_generation_prompt=True)
print(json.dumps({name: render(template) for name, template in templates.items()}))
"""


@pytest.fixture(scope="module")
def reference():
    """transformers' rendering of TEMPLATES, from the reference environment."""
    if not REFERENCE_PYTHON.exists():
        pytest.skip("no .venv-ref: make makes it")
    command = [str(REFERENCE_PYTHON), "-c", SCRIPT, str(CASES / "baseline")]
    command += [json.dumps(TEMPLATES), json.dumps(CONVERSATION)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", TEMPLATES)
def test_renders_as_transformers(reference, name):
    template = ChatTemplate(TEMPLATES[name], TokenizerFolder(CASES / "baseline").special_tokens())
    assert template.render(CONVERSATION) == reference[name]


def test_template_comes_from_the_file_or_the_config(tmp_path):
    assert ChatTemplate.load(tmp_path, {}) is None
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "named"}]
    for value, text in (("plain", "plain"), (named, "named")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": value}))
        assert ChatTemplate.load(tmp_path, {}).render(USER) == text
    (tmp_path / "chat_template.jinja").write_text("file")
    assert ChatTemplate.load(tmp_path, {}).render(USER) == "file"


def test_template_error_keeps_the_templates_words():
    template = ChatTemplate.load(CASES / "no_system_role", {})
    request = json.loads((CASES / "no_system_role" / "case.json").read_text())["request"]
    with pytest.raises(ChatTemplateError, match="System role not supported"):
        template.render(request["messages"])
    assert template.render(USER) == "<|user|>hi</s><|assistant|>"


def test_text_parts_are_text_and_other_parts_are_refused():
    template = ChatTemplate(TEMPLATES["chatml"], {})
    part = {"type": "text", "text": "hi"}
    assert template.render([{"role": "user", "content": [part]}]) == template.render(USER)
    assert "hi\nhi" in template.render([{"role": "user", "content": [part, part]}])
    with pytest.raises(ChatTemplateError, match="image_url"):
        template.render([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


@pytest.mark.parametrize("messages", [[], [{"content": "hi"}], [{"role": "user", "content": 3}]])
def test_malformed_messages_are_refused(messages):
    with pytest.raises(ChatTemplateError):
        ChatTemplate(TEMPLATES["chatml"], {}).render(messages)


def test_content_that_the_template_cannot_use_is_an_error_of_the_request():
    with pytest.raises(ChatTemplateError):
        ChatTemplate("{{ 'a' + messages[0].content }}", {}).render([{"role": "assistant", "content": None}])


@pytest.mark.parametrize("source", ["{{ 1 / 0 }}", "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}"])
def test_a_template_that_fails_is_an_error_of_the_request(source):
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, {}).render(USER)


def test_date_comes_from_the_clock():
    def noon():
        return datetime.datetime(2026, 7, 26, 12, 0)

    assert ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=noon).render(USER) == "26 Jul 2026"


@pytest.mark.parametrize(
    "source", ["{{ messages.__class__.__mro__[1].__subclasses__() }}", "{% set _ = messages.append(1) %}"]
)
def test_sandbox(source):
    with pytest.raises(ChatTemplateError):
        ChatTemplate(source, {}).render(USER)


def test_broken_template_is_refused():
    with pytest.raises(ChatTemplateError, match="does not parse"):
        ChatTemplate("{% for %}", {})
