"""The page about families in the docs, generated from their entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lpxbuild.families import families
from lpxbuild.families.family import Family

_INTRODUCTION = """# Families

Generated from `lpxbuild/families/` (`make docs`). A family is named by the `model_type` of its config.json;
TensorRT-LLM knows the architecture under the same name.

- **Tensor parallel**: the number of ranks must divide what stands there; KV heads are copied where there are more ranks
  than heads, unless they are listed. **Pipeline**: no = `parallel.pipeline` above 1 is refused.
- **Attention** beyond plain causal attention with one scale, and what executes it under `backend: openvino`
  ([attention-features.md](attention-features.md)); a feature that a model's config does not use does not count, and
  `long_rope` only counts for sequences longer than the model was trained for at first.
- **Formats** of `backend: tensorrt` and `openvino`; the sizes that their kernels take: [formats.md](formats.md).
- **Checked against**: *oracle* = every tensor bit for bit against NVIDIA ModelOpt's export; *transformers' logits* =
  the checkpoint, read back and run by the embedded engine in float32, against transformers on the same weights.
  Nothing here has been built by TensorRT-LLM itself: its class names, fields and layouts are derived from its sources.
"""

TEXT_PART = """import sys
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer

source, destination = sys.argv[1:]
whole = AutoModelForImageTextToText.from_pretrained(source, dtype="auto")
text = AutoModelForCausalLM.from_config(whole.config.text_config, dtype=whole.dtype)
text.model.load_state_dict(whole.model.language_model.state_dict())
text.lm_head.load_state_dict(whole.lm_head.state_dict())
text.save_pretrained(destination)
AutoTokenizer.from_pretrained(source).save_pretrained(destination)
"""
"""Saves the text part of a model of images and text as a model of its own; run with transformers 4.57."""

_AFTER = f"""
## Models of images and text

`Gemma3ForConditionalGeneration`, `Mistral3ForConditionalGeneration`, `LlavaForConditionalGeneration` and others hold a
text model as `language_model`. lpx refuses them, because the checkpoint would be another model than the one named.
Their text part is an ordinary model of its family once it is saved as one (in as much memory as the model has bytes):

```python
{TEXT_PART}```

Gemma 3 of 4B and more scales RoPE in some layers only, which TensorRT-LLM cannot express: `backend: pytorch` or `vllm`.
"""


def markdown(executors: Mapping[str, str], formats: Callable[[Family], str]) -> str:
    """The whole page.

    Args:
        executors: attention feature → executor of the embedded engine; a feature without one is refused.
        formats: the words about a family's quantization formats.
    """
    return f"{_INTRODUCTION}\n{markdown_table(executors, formats)}{_AFTER}"


def markdown_table(executors: Mapping[str, str], formats: Callable[[Family], str]) -> str:
    """One row for each family; the arguments are those of `markdown`."""
    head = "| family | architecture | tensor parallel divides | pipeline | attention | formats | checked against |"
    rows = [
        f"| `{family.name}` | {', '.join(f'`{name}`' for name in family.architectures)} | {_divides(family)} | "
        f"{'yes' if family.pipeline else 'no'} | {_attention(family, executors)} | {formats(family)} | "
        f"{family.checked_against} |"
        for family in sorted(families().values(), key=lambda family: family.name)
    ]
    return "\n".join([head, "|---|---|---|---|---|---|---|", *rows]) + "\n"


def _divides(family: Family) -> str:
    names = ["num_attention_heads", *([] if family.copies_kv_heads else ["num_key_value_heads"]), "intermediate_size"]
    names += [key for key in ("moe_intermediate_size", "shared_expert_intermediate_size") if key in family.defaults]
    return ", ".join(f"`{family.keys.get(name, name)}`" for name in (*names, *family.whole))


def _attention(family: Family, executors: Mapping[str, str]) -> str:
    if not family.attention:
        return "plain: paged"
    return ", ".join(f"`{feature}`: {executors.get(feature, 'refused')}" for feature in family.attention)
