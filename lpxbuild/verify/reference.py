"""Run by the interpreter that has torch and transformers; imports nothing of lpxbuild.

usage: reference.py JOB.json. What transformers computes with a Hugging Face folder in float32: logits of whole texts,
answers to prompts, and values inside the model ("points") for one short text. Writes .npy files and result.json into
the job's folder; what went wrong is the last line on stderr.

With `layerwise` no more than one decoder layer (or one table) of weights is in memory: parameters stay on the meta
device, and each part of the model reads its own from the safetensors files when it is called. With `forced` every
point is computed from the reference's values of the points before it, and then replaced by the reference's value.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

MODEL_REFUSED, HOST_LACKS = 2, 3
"""Exit statuses that lpx translates; any other but 0 is a failure."""
ROWS = 64
"""Positions whose logits are computed at a time."""


class Refused(Exception):
    """Ends the child with a status and a last line."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


# Loading ---------------------------------------------------------------------------------------------------------


def attention_of(config: Any) -> str:
    """`eager` is the plain formula (soft-caps too); Falcon's adds ALiBi's bias twice, its `sdpa` once."""
    return "sdpa" if config.model_type == "falcon" else "eager"


def whole(folder: str) -> Any:
    """The model in float32, all of it in memory."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    return AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation=attention_of(config),
        local_files_only=True,
        trust_remote_code=False,
    )


def layerwise(folder: str) -> Any:
    """The model with its parameters on the meta device, each part loading its own while it runs."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    with parameters_on_meta():
        model = AutoModelForCausalLM.from_config(
            config, torch_dtype=torch.float32, attn_implementation=attention_of(config), trust_remote_code=False
        )
    model.tie_weights()
    tensors = Tensors(Path(folder), model)
    inside: set[int] = set()
    for layer_name, layer in decoder_layers(model):
        tensors.attach(layer_name, layer)
        inside |= {id(module) for module in layer.modules()}
    for name, module in model.named_modules():
        if id(module) not in inside and next(iter(module.parameters(recurse=False)), None) is not None:
            tensors.attach(name, module)
    return model


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Buffers (tables of positions and frequencies) are computed as always; parameters get no memory."""
    import torch

    original = torch.nn.Module.register_parameter

    def register(module: Any, name: str, parameter: Any) -> None:
        if parameter is not None:
            parameter = torch.nn.Parameter(parameter.to("meta"), requires_grad=False)
        original(module, name, parameter)

    torch.nn.Module.register_parameter = register
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = original


class Tensors:
    """The parameters of a model by their place in the safetensors files."""

    def __init__(self, folder: Path, model: Any) -> None:
        from safetensors import safe_open

        self.files: dict[str, Path] = {}
        for path in sorted(folder.glob("*.safetensors")):
            with safe_open(path, "pt") as file:
                self.files.update(dict.fromkeys(file.keys(), path))
        self.prefix = f"{model.base_model_prefix}."
        self.names: dict[int, list[str]] = {}  # a tied parameter has several names
        for name, parameter in model.named_parameters(remove_duplicate=False):
            self.names.setdefault(id(parameter), []).append(name)

    def attach(self, name: str, module: Any) -> None:
        """Load before each call of the module, forget after it."""
        wanted = [
            (owner, leaf, parameter, self._find(parameter, name))
            for owner in module.modules()
            for leaf, parameter in owner.named_parameters(recurse=False)
        ]

        def load(_module: Any, _arguments: Any) -> None:
            import torch
            from safetensors import safe_open

            for owner, leaf, _, (stored, path) in wanted:
                with safe_open(path, "pt") as file:
                    tensor = file.get_tensor(stored).to(torch.float32)
                owner._parameters[leaf] = torch.nn.Parameter(tensor, requires_grad=False)

        def forget(_module: Any, _arguments: Any, _output: Any) -> None:
            for owner, leaf, parameter, _ in wanted:
                owner._parameters[leaf] = parameter

        module.register_forward_pre_hook(load)
        module.register_forward_hook(forget)

    def _find(self, parameter: Any, module: str) -> tuple[str, Path]:
        for name in self.names[id(parameter)]:
            for stored in (name, name.removeprefix(self.prefix)):
                if stored in self.files:
                    return stored, self.files[stored]
        name = self.names[id(parameter)][0]
        raise Refused(MODEL_REFUSED, f"layer by layer: no file of the model has the tensor {name} of {module}")


def decoder_layers(model: Any) -> list[tuple[str, Any]]:
    """(name, module) of the decoder layers: the outermost list that has as many entries as the config has layers."""
    import torch

    count = model.config.num_hidden_layers
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == count
    ]
    if not lists:
        raise Refused(MODEL_REFUSED, f"{type(model).__name__} has no list of {count} decoder layers")
    name, module = min(lists, key=lambda entry: len(entry[0]))
    return [(f"{name}.{index}", layer) for index, layer in enumerate(module)]


# Points ----------------------------------------------------------------------------------------------------------

QKV = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}
"""Last names of separate projections; the names of fused ones whose parts lie one after the other: """
FUSED_QKV = ("qkv_proj", "c_attn")
FUSED_MLP = "gate_up_proj"


class Place:
    """Where a point is: the input or output (a slice of its features) of a module."""

    def __init__(self, point: str, name: str, module: Any, side: str, begin: int = 0, end: int | None = None) -> None:
        self.point, self.name, self.module, self.side, self.begin, self.end = point, name, module, side, begin, end

    def as_dict(self) -> dict[str, Any]:
        return {"module": self.name, "side": self.side, "begin": self.begin, "end": self.end}


class Order:
    """The linear layers of a module in the order of their calls: roles follow from it, not from a family's table."""

    def __init__(self, prefix: str, module: Any) -> None:
        self.calls: list[tuple[str, Any]] = []
        self._handles = [
            part.register_forward_hook(self._hook(f"{prefix}.{name}" if name else prefix))
            for name, part in module.named_modules()
            if is_linear(part)
        ]

    def _hook(self, name: str) -> Any:
        def called(module: Any, _arguments: Any, _output: Any) -> None:
            self.calls.append((name, module))

        return called

    def done(self) -> list[tuple[str, Any]]:
        for handle in self._handles:
            handle.remove()
        return self.calls


def is_linear(module: Any) -> bool:
    import torch

    return isinstance(module, torch.nn.Linear) or type(module).__name__ == "Conv1D"


def places_of(model: Any, calls: list[tuple[str, Any]]) -> Iterator[Place]:
    """Every point of a model whose linear layers were called in this order."""
    layers = decoder_layers(model)
    yield Place("embedding", layers[0][0], layers[0][1], "in")
    for number, (name, layer) in enumerate(layers):
        own = [call for call in calls if call[0].startswith(f"{name}.")]
        yield from places_of_layer(model.config, f"layers.{number}", name, layer, own)
    head = model.get_output_embeddings()
    head_name = next(name for name, module in model.named_modules() if module is head)
    yield Place("ln_f", head_name, head, "in")


def places_of_layer(config: Any, point: str, name: str, layer: Any, calls: list[tuple[str, Any]]) -> Iterator[Place]:
    children = list(layer.named_children())
    attention_name, attention = next(pair for pair in children if "attention" in type(pair[1]).__name__.lower())
    inside = [call for call in calls if call[0].startswith(f"{name}.{attention_name}.")]
    yield Place(f"{point}.input_layernorm", *inside[0], "in")
    yield from projections(config, f"{point}.attention", attention, inside[:-1])
    yield Place(f"{point}.attention.context", *inside[-1], "in")
    yield Place(f"{point}.attention.dense", *inside[-1], "out")
    mlp_name, mlp = next(
        (child_name, child)
        for child_name, child in children
        if child is not attention and any(is_linear(module) for module in child.modules())
    )
    mlp_full = f"{name}.{mlp_name}"
    yield Place(f"{point}.post_layernorm", mlp_full, mlp, "in")
    yield from inside_mlp(f"{point}.mlp", mlp, [call for call in calls if call[0].startswith(f"{mlp_full}.")])
    yield Place(f"{point}.mlp", mlp_full, mlp, "out")
    yield Place(point, name, layer, "out")


def projections(config: Any, point: str, attention: Any, calls: list[tuple[str, Any]]) -> Iterator[Place]:
    for name, module in calls:
        last = name.rpartition(".")[2]
        if last in QKV:
            yield Place(f"{point}.{QKV[last]}", name, module, "out")
        elif last in FUSED_QKV:
            heads = config.num_attention_heads
            size = getattr(attention, "head_dim", config.hidden_size // heads)
            query, key = heads * size, (getattr(config, "num_key_value_heads", None) or heads) * size
            for part, begin, end in (
                ("q", 0, query),
                ("k", query, query + key),
                ("v", query + key, query + 2 * key),
            ):
                yield Place(f"{point}.{part}", name, module, "out", begin, end)


def inside_mlp(point: str, mlp: Any, calls: list[tuple[str, Any]]) -> Iterator[Place]:
    import torch

    if any(isinstance(module, torch.nn.ModuleList) for module in mlp.modules()):  # experts
        for name, module in calls[:1]:
            yield Place(f"{point}.router", name, module, "out")
        return
    *inner, last = calls
    for name, module in inner:
        leaf = name.rpartition(".")[2]
        if leaf == FUSED_MLP:
            half = module.weight.shape[0] // 2
            yield Place(f"{point}.gate", name, module, "out", 0, half)
            yield Place(f"{point}.up", name, module, "out", half, 2 * half)
        else:
            yield Place(f"{point}.{ {'gate_proj': 'gate', 'up_proj': 'up'}.get(leaf, 'fc') }", name, module, "out")
    yield Place(f"{point}.inner", *last, "in")


class Points:
    """Records the points of one run; forced values take the place of what the model computed."""

    def __init__(self, places: list[Place], folder: Path, forced: dict[str, Any]) -> None:
        self.folder, self.forced = folder, forced
        self.described: dict[str, Any] = {}
        self._handles: list[Any] = []
        by_module: dict[tuple[int, str], list[Place]] = {}
        for place in places:
            by_module.setdefault((id(place.module), place.side), []).append(place)
        for group in by_module.values():
            module = group[0].module
            if group[0].side == "in":
                hook = module.register_forward_pre_hook(self._before(group), with_kwargs=True)
            else:
                hook = module.register_forward_hook(self._after(group))
            self._handles.append(hook)

    def done(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _before(self, group: list[Place]) -> Any:
        def before(_module: Any, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> Any:
            if arguments:
                return (self._seen(arguments[0], group), *arguments[1:]), keywords
            return arguments, {**keywords, "hidden_states": self._seen(keywords["hidden_states"], group)}

        return before

    def _after(self, group: list[Place]) -> Any:
        def after(_module: Any, _arguments: Any, output: Any) -> Any:
            if isinstance(output, tuple):
                return (self._seen(output[0], group), *output[1:])
            return self._seen(output, group)

        return after

    def _seen(self, value: Any, group: list[Place]) -> Any:
        import numpy as np
        import torch

        value = value.clone()
        for place in group:
            if place.point in self.described:
                continue  # a module that is called twice is looked at once
            part = value[..., place.begin : place.end]
            number = len(self.described)
            np.save(self.folder / f"point{number}.npy", part.reshape(-1, part.shape[-1]).numpy())
            self.described[place.point] = {"file": f"point{number}.npy", **place.as_dict()}
            if place.point in self.forced:
                stored = np.load(self.forced[place.point])
                value[..., place.begin : place.end] = torch.from_numpy(stored).reshape(part.shape)
        return value


def points(model: Any, ids: list[int], folder: Path, forced: dict[str, Any]) -> dict[str, Any]:
    """Files of each point's values [tokens, features], and the modules they belong to; "logits" among them."""
    import numpy as np
    import torch

    order = Order("", model)
    order_ids = torch.tensor([ids[:2]])  # two tokens tell the order of the calls
    model(order_ids, use_cache=False)
    calls = [(name.removeprefix("."), module) for name, module in order.done()]
    folder.mkdir(exist_ok=True)
    recorder = Points(list(places_of(model, calls)), folder, forced)
    logits = model(torch.tensor([ids]), use_cache=False).logits[0]
    recorder.done()
    np.save(folder / "logits.npy", logits.numpy())
    head = model.get_output_embeddings()
    head_name = next(name for name, module in model.named_modules() if module is head)
    return {**recorder.described, "logits": {"file": "logits.npy", "module": head_name, "side": "out"}}


# Texts and answers -----------------------------------------------------------------------------------------------


def body_of(model: Any) -> Any:
    """The model without its head."""
    body = model.base_model
    return body if body is not model else model.get_decoder()


def hidden_states(model: Any, sequences: list[list[int]]) -> tuple[list[Any], Any]:
    """The last hidden states of each sequence, and the class of the body's output.

    They go through the model as one batch, padded at the end, where a causal model does not see the padding: so a
    layer that is read from disk is read once.
    """
    import torch

    longest = max(map(len, sequences))
    ids = torch.zeros((len(sequences), longest), dtype=torch.long)
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)] = torch.tensor(sequence)
    output = body_of(model)(ids, use_cache=False)
    found = output.last_hidden_state
    return [found[row, : len(sequence)] for row, sequence in enumerate(sequences)], type(output)


def logits_of(model: Any, hidden: Any, output_class: Any) -> Any:
    """What the model makes of the last hidden states [tokens, size]: its own forward, its body answering with them."""
    import torch

    body = body_of(model)
    original = body.forward

    def answer(*_arguments: Any, **_keywords: Any) -> Any:
        return output_class(last_hidden_state=hidden[None])

    body.forward = answer
    try:
        return model(torch.zeros((1, len(hidden)), dtype=torch.long), use_cache=False).logits[0]
    finally:
        body.forward = original


def write_logits(model: Any, hidden: Any, output_class: Any, path: Path) -> None:
    import numpy as np

    file = None
    open_memmap: Any = np.lib.format.open_memmap
    for begin in range(0, len(hidden), ROWS):
        block = logits_of(model, hidden[begin : begin + ROWS], output_class).numpy()
        if file is None:
            file = open_memmap(path, "w+", np.float32, (len(hidden), block.shape[1]))
        file[begin : begin + len(block)] = block
        file.flush()


def answer_of(
    model: Any, choices: list[int], prompt: list[int], given: list[int], *, length: int, ends: list[int]
) -> dict[str, Any]:
    """The model's greedy answer, read off its choices along the other's answer as far as they agree.

    Beyond the first difference only that token is known, unless `length` lets the model generate the rest.
    """
    import torch

    same = next((i for i, token in enumerate(given) if choices[i] != token), len(given))
    if given and same == len(given):
        return {"ids": given, "complete": True}
    ids = [*given[:same], choices[same]]
    cache, feed = None, [*prompt, *ids]
    while len(ids) < length and ids[-1] not in ends:
        step = model(torch.tensor([feed]), past_key_values=cache, use_cache=True)
        cache, feed = step.past_key_values, [int(step.logits[0, -1].argmax())]
        ids += feed
    return {"ids": ids, "complete": length > 0}


def work(job: dict[str, Any]) -> None:
    import torch

    torch.set_num_threads(job["threads"])
    torch.use_deterministic_algorithms(True, warn_only=True)
    folder = Path(job["out"])
    try:
        model = (layerwise if job["layerwise"] else whole)(job["folder"]).eval()
    except (ValueError, KeyError, ImportError) as error:
        raise Refused(MODEL_REFUSED, f"transformers cannot load the model: {' '.join(str(error).split())}") from None
    result: dict[str, Any] = {"class": type(model).__name__, "answers": []}
    with torch.inference_mode():
        answers = job["answers"]
        sequences = [*job["sequences"], *([*answer["prompt"], *answer["ids"]] for answer in answers)]
        hidden, output_class = hidden_states(model, sequences) if sequences else ([], None)
        for number in range(len(job["sequences"])):
            write_logits(model, hidden[number], output_class, folder / f"logits{number}.npy")
        length, ends = 0 if job["layerwise"] else job["length"], job["end_ids"]
        for answer, states in zip(answers, hidden[len(job["sequences"]) :]):
            prompt, given = answer["prompt"], answer["ids"]
            choices = logits_of(model, states[len(prompt) - 1 :], output_class).argmax(-1).tolist()
            result["answers"].append(answer_of(model, choices, prompt, given, length=length, ends=ends))
        if job["probe"]:
            result["points"] = points(model, job["probe"], folder / "points", job["forced"])
    (folder / "result.json").write_text(json.dumps(result))


def main(path: str) -> int:
    job = json.loads(Path(path).read_bytes())
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: not to outlive lpx, however that ends
    if os.getppid() != job["parent"]:
        return 1
    warnings.simplefilter("ignore")
    try:
        work(job)
    except Refused as refused:
        sys.stderr.write(f"{refused}\n")
        return refused.status
    except MemoryError:
        sys.stderr.write("memory ran out\n")
        return HOST_LACKS
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
