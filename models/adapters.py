"""Adapters: low-rank products added to a model's kernels (LoRA; Hu et al., 2021), one for all rows or one for each row.

An adapter is a nested dict of arrays with the paths of the kernels that it adapts, so it is trained, sharded and saved
as weights are. `apply` attaches it to a model's weights, `merge` adds it to them, and `stack` combines several, of
which each row selects one. The factor `alpha / rank` of a published adapter is part of `b`.

>>> import jax, decodax as dx
>>> lm = dx.load("pycode")
>>> adapter = dx.adapters.init(lm.params, jax.random.key(0), rank=4)
>>> adapted = dx.adapters.apply(lm.params, adapter)         # under jit and grad, too
>>> sorted(adapter["layers"]["0"]["attn"]), adapter["layers"]["0"]["attn"]["q"]["kernel"]["a"].shape
(['q', 'v'], (256, 4))
"""

from __future__ import annotations

import json
import math
import os
import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from decodax.common.names import directory
from decodax.models.adapter_config import checked
from decodax.models.config import DecoderConfig
from decodax.models.names import FAMILY_NAMES, IMAGES, LLAMA, Names, flatten
from decodax.models.packed import Adapted, Packed
from decodax.models.transformer import Transformer, Weights
from decodax.models.weight_source import unwrapped

__all__ = ["PARTS", "Adapter", "apply", "init", "merge", "read", "save", "stack"]

__dir__ = directory(__all__)

Adapter = dict[str, Any]
"""A nested dict with `{"a": f[K, r], "b": f[r, N]}` in the place of each adapted kernel."""

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

STEM = "base_model.model."
"""Prefix of a module's name in peft's tensor names."""

PARTS = ("q", "k", "v", "o", "gate", "up", "down")
"""Projections that can be adapted."""


def init(params: Weights, key: Array, rank: int = 8, targets: Sequence[str] | None = ("q", "v"),
         dtype: jax.typing.DTypeLike = jnp.float32) -> Adapter:
    """Returns a new adapter that does not change the model's output: `a` is uniform as in peft, `b` is zero.

    Args:
        params: the model's weights.
        key: a random key.
        rank: rank of the products.
        targets: projections to adapt: "q", "k", "v", "o" of attention, "gate", "up", "down" of the MLP; None: all that
            the model has.
        dtype: dtype of the adapter.

    Raises:
        ValueError: the model does not have a target.
    """
    if rank < 1:
        raise ValueError(f"rank: got {rank}, takes a whole number of at least 1")
    places = _places(params)
    known = {_part(path) for path in places}
    targets = tuple(known) if targets is None else targets
    for target in targets:
        if target not in known:
            raise ValueError(f"targets: got {target!r}, takes {', '.join(sorted(known))}")
    made: Adapter = {}
    chosen = [path for path in places if _part(path) in targets]
    for path, one in zip(chosen, jax.random.split(key, len(chosen)), strict=True):
        inputs, outputs = _size(places[path])
        bound = math.sqrt(1 / inputs)
        _put(made, path, {"a": jax.random.uniform(one, (inputs, rank), dtype, -bound, bound),
                          "b": jnp.zeros((rank, outputs), dtype)})
    return made


def apply(params: Weights, adapter: Adapter) -> Weights:
    """Returns the weights with an adapter, or several combined by `stack`, attached to their kernels. Nothing is
    copied.

    Raises:
        ValueError: the adapter has a path or a shape that does not fit the weights; the message names it.
    """
    return _with(params, adapter, lambda kernel, low: Adapted(kernel, low["a"], low["b"]))


def merge(params: Weights, adapter: Adapter) -> Weights:
    """Returns the weights with an adapter added to them, in their own dtype, so that decoding is as fast as without an
    adapter.

    Raises:
        ValueError: as in `apply`, or a kernel is packed, so that nothing can be added to it.
    """
    def one(kernel: Any, low: Any) -> Array:
        if isinstance(kernel, Packed):
            raise ValueError("adapter: cannot be merged into packed weights; takes merge=False, which keeps it beside "
                             "them")
        return Adapted(kernel, low["a"], low["b"]).merged().astype(kernel.dtype)

    return _with(params, adapter, one)


def stack(adapters: Sequence[Adapter]) -> Adapter:
    """Combines adapters so that each row can select one: adapter `i` gets number `i + 1`, and number 0 selects none.

    Adapters of smaller rank, and kernels that an adapter does not change, are padded with zeros.

    Raises:
        ValueError: the list is empty, or two adapters belong to different models.
    """
    if not adapters:
        raise ValueError("adapters: got none, takes at least one")
    found = [_lows(adapter) for adapter in adapters]
    made: Adapter = {}
    for path in dict.fromkeys(path for each in found for path in each):
        have = [each[path] for each in found if path in each]
        sizes = {(low["a"].shape[0], low["b"].shape[1]) for low in have}
        if len(sizes) > 1:
            raise ValueError(f"adapters: {path} has kernels of {' and '.join(map(str, sorted(sizes)))}")
        (inputs, outputs), dtype = sizes.pop(), have[0]["a"].dtype
        rank = max(low["a"].shape[1] for low in have)
        none = {"a": jnp.zeros((inputs, 0), dtype), "b": jnp.zeros((0, outputs), dtype)}
        lows = [none, *(each.get(path, none) for each in found)]
        _put(made, path, {
            "a": jnp.stack([jnp.pad(low["a"].astype(dtype), ((0, 0), (0, rank - low["a"].shape[1]))) for low in lows]),
            "b": jnp.stack([jnp.pad(low["b"].astype(dtype), ((0, rank - low["b"].shape[0]), (0, 0))) for low in lows])})
    return made


def read(directory: str | os.PathLike[str], model: Transformer, family: str = "llama",
         dtype: jax.typing.DTypeLike = jnp.float32) -> Adapter:
    """Reads an adapter in peft's layout: `adapter_config.json` and `adapter_model.safetensors`.

    `decodax.models.adapter_config` lists the supported entries. Keys of patterns that match no tensor's module have no
    effect, as in peft; a warning names them.

    Args:
        directory: path of the adapter.
        model: the model that it adapts.
        family: the `model_type` of the model's `config.json`, which determines the tensor names.
        dtype: dtype of the adapter.

    Raises:
        ValueError: a file is missing or broken, it is not a plain LoRA, its entries and tensors contradict each other,
            or it does not fit the model; the message names the entry or the tensor.
    """
    root = Path(directory)
    try:
        entries = json.loads((root / CONFIG).read_text())
        tensors = load_file(root / WEIGHTS)
    except (OSError, ValueError, SafetensorError) as error:
        raise ValueError(f"{root}: takes the directory of an adapter with {CONFIG} and {WEIGHTS} ({error})") from None
    if not isinstance(entries, Mapping):
        raise ValueError(f"{root / CONFIG}: got {type(entries).__name__}, takes a JSON object")
    try:
        config = checked(entries)
    except ValueError as error:
        raise ValueError(f"{root / CONFIG}: {error}") from None
    names = FAMILY_NAMES.get(family, Names(LLAMA))
    shapes = flatten(model.abstract_params())
    paths = {f"{names.layers}.{i}.{module}": path for path, (i, module) in _modules(model.config, names).items()
             if f"{path}.kernel" in shapes}
    # The dense layers of a mixture may have separate tensors where its experts have one.
    fused = {names.layer[group[0]].replace("{half}", str(half)) for group in names.fused for half in range(names.halves)
             if len({names.layer[member] for member in group}) == 1}
    made: Adapter = {}
    adapted: dict[str, str] = {}
    for tensor in sorted(tensors):
        found = re.fullmatch(
            rf"((?:.*?\.)?)({re.escape(names.layers)}\.\d+\..+?)\.lora_(A|B)(?:\.default)?\.weight", unwrapped(tensor))
        if found is None or IMAGES.search(found[1].removeprefix(STEM)):
            raise ValueError(f"{root / WEIGHTS}: tensor {tensor} is not a lora_A or lora_B of a layer of the language "
                             "model")
        if found[3] == "B":
            continue
        module = found[2]
        if module.split(".", 2)[2] in fused:
            raise ValueError(f"{root / WEIGHTS}: tensor {tensor} adapts projections that are fused in the file; "
                             "takes adapters of single ones")
        path, other = paths.get(module), tensor.replace("lora_A", "lora_B")
        if path is None or other not in tensors:
            raise ValueError(f"{root / WEIGHTS}: tensor {tensor} has no place in the model" if path is None else
                             f"{root / WEIGHTS}: lacks {other} beside {tensor}")
        a, b = (tensors[name].astype(np.float32).T for name in (tensor, other))
        wanted = shapes[f"{path}.kernel"].shape
        if (a.shape[0], b.shape[1]) != wanted or a.shape[1] != b.shape[0]:
            raise ValueError(f"{root / WEIGHTS}: tensor {tensor} has factors {a.shape} and {b.shape}, which do not fit "
                             f"the kernel {wanted}")
        whole = f"{found[1].removeprefix(STEM)}{module}"
        if not config.adapts(whole):
            raise ValueError(f"{root / WEIGHTS}: tensor {tensor} adapts a module that {CONFIG} does not select "
                             "(target_modules, exclude_modules, layers_to_transform)")
        if a.shape[1] != config.rank(whole):
            raise ValueError(f"{root / WEIGHTS}: tensor {tensor} has rank {a.shape[1]}, r and rank_pattern of {CONFIG} "
                             f"say {config.rank(whole)}")
        if path in adapted:
            raise ValueError(f"{root / WEIGHTS}: tensor {tensor} adapts a projection that another one adapts already")
        adapted[path] = whole
        _put(made, f"{path}.kernel", {"a": jnp.asarray(a, dtype), "b": jnp.asarray(b * config.scale(whole), dtype)})
    if not made:
        raise ValueError(f"{root / WEIGHTS}: holds no tensor")
    if idle := config.unmatched(adapted.values()):
        warnings.warn(f"{root / CONFIG}: {', '.join(idle)}: matches no module of the adapter, and has no effect",
                      stacklevel=2)
    return made


def save(directory: str | os.PathLike[str], adapter: Adapter, model: Transformer, family: str = "llama",
         base: str | None = None) -> None:
    """Writes an adapter in peft's layout.

    Args:
        directory: path to write to.
        adapter: the adapter.
        model: the model that it adapts.
        family: the `model_type` that the model is saved as.
        base: the model's name.
    """
    names = FAMILY_NAMES.get(family, Names(LLAMA))
    modules, tensors, rank = _modules(model.config, names), {}, 1
    for path, low in _lows(adapter).items():
        index, module = modules[path.removesuffix(".kernel")]
        stem = f"{STEM}{names.stem}{names.layers}.{index}.{module}"
        tensors[f"{stem}.lora_A.weight"] = np.ascontiguousarray(np.asarray(low["a"], np.float32).T)
        tensors[f"{stem}.lora_B.weight"] = np.ascontiguousarray(np.asarray(low["b"], np.float32).T)
        rank = low["a"].shape[1]
    ranks = {path: low["a"].shape[1] for path, low in _lows(adapter).items()}
    full = lambda path: "{}.{}.{}".format(names.layers, *modules[path.removesuffix(".kernel")])
    other = {full(path): r for path, r in ranks.items() if r != rank}
    root = Path(directory)
    root.mkdir(parents=True, exist_ok=True)
    save_file(tensors, root / WEIGHTS, metadata={"format": "pt"})
    targets = sorted({modules[path.removesuffix(".kernel")][1].split(".")[-1] for path in ranks})
    (root / CONFIG).write_text(json.dumps({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": base, "r": rank, "lora_alpha": rank,
        "lora_dropout": 0.0, "bias": "none", "target_modules": targets, "rank_pattern": other,
        "alpha_pattern": other, "fan_in_fan_out": not names.transposed, "inference_mode": True}, indent=2) + "\n")


def _modules(config: DecoderConfig, names: Names) -> dict[str, tuple[int, str]]:
    """Returns, for the path of each projection, the index of its layer and its module name in files."""
    return {f"layers.{i}.{inner}": (i // names.halves, module.replace("{half}", str(i % names.halves)))
            for i in range(len(config.layers)) for inner, module in names.layer.items()
            if inner.rsplit(".", 1)[-1] in PARTS}


def _with(params: Weights, adapter: Adapter, put: Any) -> Weights:
    places, lows = _places(params), _lows(adapter)
    for path, low in lows.items():
        if path not in places:
            raise ValueError(f"adapter: adapts {path}, which the model does not have as a single kernel")
        sizes = (low["a"].shape[-2], low["b"].shape[-1])
        if sizes != _size(places[path]):
            raise ValueError(f"adapter: {path} has a kernel {sizes}, the model's is {_size(places[path])}")

    def walk(node: Any, path: str) -> Any:
        if path in lows:
            if isinstance(node, Adapted):
                raise ValueError(f"adapter: {path} has one already; takes weights without one (merge or stack them)")
            return put(node, lows[path])
        if isinstance(node, dict):
            return {name: walk(value, f"{path}.{name}" if path else name) for name, value in node.items()}
        return node

    return walk(params, "")


def _places(params: Weights) -> dict[str, Any]:
    """Returns the kernels that can be adapted, by dotted path."""
    return {path: leaf for path, leaf in flatten(params).items()
            if path.startswith("layers.") and path.endswith(".kernel") and _part(path) in PARTS
            and len(_size(leaf)) == 2}


def _part(path: str) -> str:
    return path.split(".")[-2]


def _size(kernel: Any) -> tuple[int, ...]:
    """Returns the numbers of inputs and outputs of a kernel."""
    if isinstance(kernel, Adapted):
        return _size(kernel.kernel)
    return kernel.shape[::-1] if isinstance(kernel, Packed) else kernel.shape


def _lows(adapter: Adapter, path: str = "") -> dict[str, Any]:
    """Returns the pairs `a` and `b` of an adapter, by dotted path of the kernel."""
    if not isinstance(adapter, Mapping):
        raise ValueError(f"adapter: got {type(adapter).__name__}, takes a nested dict such as decodax.adapters.init "
                         "makes")
    if set(adapter) == {"a", "b"}:
        return {path: adapter}
    inside = (_lows(value, f"{path}.{name}" if path else name) for name, value in adapter.items())
    return {p: low for found in inside for p, low in found.items()}


def _put(tree: Adapter, path: str, low: Any) -> None:
    *above, name = path.split(".")
    for step in above:
        tree = tree.setdefault(step, {})
    tree[name] = low
