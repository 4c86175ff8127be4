"""Where the points of a model are, found by the order in which it calls its linear layers, and their values.

With forced values every point is computed from the reference's values of the points before it, and then replaced by
the reference's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from .loading import decoder_layers

QKV = {"q_proj": "q", "k_proj": "k", "v_proj": "v"}
"""Last names of separate projections; the names of fused ones whose parts lie one after the other: """
FUSED_QKV = ("qkv_proj", "c_attn")
FUSED_MLP = "gate_up_proj"


class Place:
    """Where a point is: the input or output (a slice of its features) of a module."""

    def __init__(self, point: str, name: str, module: Any, side: str, begin: int = 0, end: int | None = None) -> None:
        self.point, self.name, self.module, self.side, self.begin, self.end = point, name, module, side, begin, end
        self.linear = name
        self.vectors = False

    def through(self, *, linear: str | None = None, vectors: bool = False) -> Place:
        """What lies before the point: a linear layer that has its format, stored vectors (norms of heads)."""
        self.linear, self.vectors = linear or self.linear, vectors
        return self

    def as_dict(self) -> dict[str, Any]:
        return {
            "module": self.name,
            "side": self.side,
            "begin": self.begin,
            "end": self.end,
            "linear": self.linear,
            "vectors": self.vectors,
        }


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
    others = [module for module in attention.modules() if not is_linear(module)]
    vectors = any(next(iter(module.parameters(recurse=False)), None) is not None for module in others)
    # A fused projection that cannot be taken apart lies between this point and the norm before it.
    context = Place(f"{point}.attention.context", *inside[-1], "in")
    yield context.through(linear=inside[0][0], vectors=vectors)
    yield Place(f"{point}.attention.dense", *inside[-1], "out")
    mlp_name, mlp = next(
        (child_name, child)
        for child_name, child in children
        if child is not attention and any(is_linear(module) for module in child.modules())
    )
    mlp_full = f"{name}.{mlp_name}"
    yield Place(f"{point}.post_layernorm", mlp_full, mlp, "in")
    yield from inside_mlp(f"{point}.mlp", mlp, [call for call in calls if call[0].startswith(f"{mlp_full}.")])
    linears = [name for name, module in mlp.named_modules() if is_linear(module)]
    # Experts share a format: any linear layer of theirs stands for all; without experts the last one made the point.
    expert = next((name for name in linears if "experts." in name), None)
    last = [call for call in calls if call[0].startswith(f"{mlp_full}.")][-1][0]
    yield Place(f"{point}.mlp", mlp_full, mlp, "out").through(linear=f"{mlp_full}.{expert}" if expert else last)
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
