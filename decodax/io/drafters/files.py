"""A trained drafter, and its directory: `config.json` and `model.safetensors`.

The library's own layout stores the head's configuration as it is, and a tensor for each weight. Directories that others
have published are recognised by their `config.json` (`decodax.io.drafters.published`).
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from decodax.core.types import LayeredModel
from decodax.io.drafters.eagle import FeedsBack, LayerIds
from decodax.io.drafters.further import further_in
from decodax.io.drafters.gguf import further_blocks, read_further_blocks
from decodax.io.drafters.published import Conventions, is_published, read_published
from decodax.io.drafters.stacked import medusa_in
from decodax.io.files import CheckpointError, Files, read_json, write_files
from decodax.io.kinds import DRAFTER, ZOO, is_drafter, is_gguf, shipped_path
from decodax.models.blocks.options import BlockIndex, Layer, OutputGate, QueryScale
from decodax.models.compressed.options import PoolIndex, Pooling, SharedKey
from decodax.models.config import DecoderConfig, NormConfig
from decodax.models.drafters.assistant import AssistantHead
from decodax.models.drafters.block import BlockHead
from decodax.models.drafters.chimera import ChimeraHead
from decodax.models.drafters.clover import CloverHead
from decodax.models.drafters.corrections import CandidateSelector, Markov, PrefixGRU, Refiner
from decodax.models.drafters.cross_kv import CrossKVHead
from decodax.models.drafters.depthwise import DepthwiseHead
from decodax.models.drafters.falcon import FalconHead
from decodax.models.drafters.further import FURTHER
from decodax.models.drafters.hamburger import HamburgerHead
from decodax.models.drafters.head import DraftHead, Weights
from decodax.models.drafters.hydra import HydraHead
from decodax.models.drafters.local_convolution import LocalConvolution
from decodax.models.drafters.mixture import MixtureHead
from decodax.models.drafters.parallel import ParallelHead
from decodax.models.drafters.prompt_tokens import HiddenTransferHead, LookAheadHead, PromptTokensHead
from decodax.models.drafters.recurrent import RecurrentHead
from decodax.models.drafters.specs import head_shardings
from decodax.models.drafters.stack import BlockwiseHead, MedusaHead, MLPSpeculatorHead
from decodax.models.drafters.units import UnitHead
from decodax.models.families import family_of
from decodax.models.formats import Format, kernels, without_data
from decodax.models.latent.shape import Indexer, Latent
from decodax.models.names import flatten
from decodax.models.packed import Packed
from decodax.models.residual.options import HyperConnections
from decodax.models.rope import Dynamic, LinearScaling, Llama3, LongRope, Proportional, Rope, Yarn
from decodax.models.routing import ClippedSwiGLU, Experts
from decodax.models.transformer import Transformer
from decodax.models.weight_source import nested, stored_dtype

QUANTISED = re.compile(r"[.-](I?Q\d\w*|F16|BF16|F32)$", re.IGNORECASE)
"""The end of the name of a GGUF file that says how its weights are stored."""

JOINT_FOLDER = "heads"
"""Folder of the heads within the directory of a target that was trained with them (`decodax.train.drafting.joint`)."""

PARTS = {kind.__name__: kind for kind in (
    RecurrentHead, DepthwiseHead, ParallelHead, AssistantHead, BlockHead, Markov, PrefixGRU, CandidateSelector, Refiner,
    LocalConvolution, MedusaHead, HydraHead, CloverHead, ChimeraHead, MLPSpeculatorHead, BlockwiseHead,
    PromptTokensHead, HiddenTransferHead, LookAheadHead, FalconHead, CrossKVHead, MixtureHead, UnitHead, HamburgerHead,
    DecoderConfig, NormConfig, Layer, QueryScale, Rope, Dynamic, LinearScaling, Llama3, LongRope, Proportional, Yarn,
    Latent, Indexer, SharedKey, PoolIndex, Pooling, BlockIndex, OutputGate, HyperConnections, ClippedSwiGLU, Experts)}
"""The classes of which a head's configuration is made."""


@dataclasses.dataclass(frozen=True)
class TrainedDrafter:
    """A trained drafter ready to draft: its network and weights.

    Attributes:
        system: name of the method that it was trained for, such as "eagle3".
        head: its network.
        params: the network's weights.
        ids: `i32[Vd]`, the target's token for each of its logits; None: they are the target's. For units of several
            tokens (MuMo) `i32[U, L]`, padded with -1.
        name: the name or path from which it was loaded.
    """

    system: str
    head: DraftHead
    params: Weights = dataclasses.field(repr=False)
    ids: Array | None = dataclasses.field(default=None, repr=False)
    name: str = "drafter"

    def check(self, target: Any) -> None:
        """Checks that the drafter fits a target, a result of `decodax.load`.

        Raises:
            ValueError: it reads hidden states of another width, more layers than the target has, or keys and values
                of another shape.
        """
        if not isinstance(target.model, Transformer):
            return                      # its sizes are not known here
        width, layers = target.model.config.width, target.model.depth
        if width != self.head.target_width:
            raise ValueError(f"draft: {self.name!r} reads hidden states of width {self.head.target_width}, and those "
                             f"of {target.name!r} have {width}; takes a drafter that was trained for this target")
        several = self.head.tap_width > self.head.target_width      # of residual streams
        if self.head.taps and max(self.head.taps) >= layers and not several:
            raise ValueError(f"draft: {self.name!r} reads the outputs of the layers {self.head.taps}, and "
                             f"{target.name!r} has {layers}; takes a drafter that was trained for this target")
        self.head.check_target(target.model.config)
        # The streams follow the layers, whose outputs are narrower; see `DraftHead.taps`.
        if several and self.head.taps != (layers,):
            raise ValueError(f"draft: {self.name!r} reads the residual streams at the layers {self.head.taps}, and "
                             f"those of {target.name!r} follow its {layers} layers; takes a drafter that was trained "
                             "for this target")


def shipped_drafter(system: str, target: str) -> Path | None:
    """Returns the directory of the drafter that is shipped for a system and a target, by their names, or None. The
    target may be a path, and GGUF files of a model in several formats have one drafter.

    >>> shipped_drafter("eagle-3", "models/pycode.Q8_0.gguf").name
    'pycode-eagle-3'
    """
    path = ZOO / f"{QUANTISED.sub('', Path(target).name.removesuffix('.gguf'))}-{system}"
    return path if path.parent == ZOO and (path / "config.json").is_file() else None


def holds_drafter(path: str | os.PathLike[str]) -> bool:
    """Returns True if a path is a directory of a trained drafter, and of no language model, in any layout that
    `load_drafter` reads."""
    return is_drafter(path) or is_published(shipped_path(path))


def heads_beside(directory: str | os.PathLike[str] | None, *systems: str) -> Path | None:
    """Returns the folder of heads that were trained together with the target in a directory, for one of the methods
    `systems` (none: any), or None."""
    path = Path(directory or "") / JOINT_FOLDER
    if directory is None or not (path / "config.json").is_file():
        return None
    system = read_json(path / "config.json").get(DRAFTER)
    return path if system is not None and (not systems or system in systems) else None


def own_drafter(target: Any, *systems: str) -> Path | None:
    """Returns the directory or the GGUF file of a target, a result of `decodax.load`, if its own files hold a drafter
    for one of the methods `systems` that can be read, or None: layers for multi-token prediction ("mtp"), or Medusa's
    heads in a directory ("medusa")."""
    path = target.directory
    if path is not None and (path / "config.json").is_file():
        config = read_json(path / "config.json")
        found = ("mtp" in systems and family_of(config) in FURTHER and further_in(path, config)) or (
            "medusa" in systems and medusa_in(path))
        return path if found else None
    return target.file if "mtp" in systems and target.file is not None and further_blocks(target.file) else None


def load_drafter(directory: str | os.PathLike[str], target: Any = None, *,
                 dtype: jax.typing.DTypeLike | None = None, layer_ids: LayerIds | None = None,
                 feeds_back: FeedsBack | None = None, layers: Sequence[int] | None = None, mask: int | None = None,
                 causal_sliding: bool | None = None, weights: str | Format | None = None) -> TrainedDrafter:
    """Loads a trained drafter: one of this library, or one in a layout that others have published (Medusa, Hydra and
    Hydra++, IBM's MLP speculator, EAGLE-1 to 3 of the authors, SpecForge, speculators and NVIDIA; P-EAGLE; DFlash,
    DSpark, Domino, DFlash2, JetSpec and XPress; the assistants of Gemma 4 and Muse Glimmer), or the layers for
    multi-token prediction inside a target's own directory (DeepSeek-V3, GLM-4.5, Qwen3-Next, Qwen3.5, MiMo, ERNIE 4.5,
    Hy3, Nemotron 3 and others) or GGUF file (GLM-4.5 to 5.3, Qwen3.5, Hy3, Ling 3 and others) or by themselves
    (speculators), or heads inside a target's directory, among its files (Medusa-2) or in the folder that joint training
    writes. `decodax.load` skips drafters inside a target.

    Args:
        directory: name of a shipped drafter, or path of a directory with `config.json` and its weights; for layers
            inside a target, that of the target, or of its GGUF file.
        target: the target, a result of `decodax.load`, which the drafter is checked against, and whose shape published
            files of Hydra++ leave to it. If it lies on a mesh, the drafter is divided over that like a decoder.
            None: no check.
        dtype: dtype of the weights; None: bfloat16 on an accelerator, and float32 on CPU.
        layer_ids: for EAGLE-3, whether the file's layers of the target are named by their "outputs" or their "inputs";
            None: as its producer does, if that is known.
        feeds_back: for EAGLE-3, the state that is fed back; None: as its producer does, if that is known.
        layers: for block heads (DFlash and its successors), the target's layers whose outputs are read, counted from 0;
            None: as the file says.
        mask: for block heads, the mask token's id; None: as the file says.
        causal_sliding: for block heads, True if layers with a sliding window see a block in order, False if they see
            all of it; None: as the file says.
        weights: the format in which the kernels are stored and multiplied, such as "int8", one that needs no
            calibration data; None: arrays of `dtype`.

    Raises:
        ValueError: the directory holds no drafter, a tensor is missing or has another shape, the file leaves open what
            it means and the argument that says it is not given, or the drafter does not fit the target.
    """
    path = shipped_path(directory)
    path = heads_beside(path) or path
    kind = jnp.dtype(dtype or (jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16))
    if not (in_file := is_gguf(path)) and not (path / "config.json").is_file():
        raise CheckpointError(f"directory: {path} has no config.json, takes the directory of a trained drafter")
    config = {} if in_file else read_json(path / "config.json")
    if in_file:
        made = TrainedDrafter("mtp", *read_further_blocks(path, kind.name), name=str(directory))
    elif DRAFTER in config:
        head = decoded(config["head"])
        made = TrainedDrafter(config[DRAFTER], head, *_read(path, head, kind), str(directory))
    else:
        depth = target.model.depth if target is not None and isinstance(target.model, LayeredModel) else None
        shape = None if depth is None else target.model.config
        how = Conventions(depth, layer_ids, feeds_back, layers, mask, causal_sliding, shape)
        made = TrainedDrafter(*read_published(path, kind, how), str(directory))
    if (packing := without_data(weights)) is not None:
        made = dataclasses.replace(made, params=_packed(made.params, packing))
    if target is not None:
        made.check(target)
        if target.mesh is not None:
            whole = NamedSharding(target.mesh, PartitionSpec())
            params = jax.device_put(made.params, head_shardings(made.head, made.params, target.mesh))
            made = dataclasses.replace(made, params=params, ids=jax.device_put(made.ids, whole))
    return made


def _packed(params: Weights, packing: Format) -> Weights:
    """Returns weights with their kernels packed, one in memory after the other."""
    pack = jax.jit(lambda kernel: packing.pack(kernel).here())
    chosen = {path for path in kernels(params) if path != "embed" and packing.packs(path)}
    return nested({path: pack(leaf) if path in chosen and not isinstance(leaf, Packed) else leaf
                   for path, leaf in flatten(params).items()})


def _read(path: Path, head: Any, dtype: Any) -> tuple[Weights, Array | None]:
    files = Files(path)
    shapes = flatten(head.abstract_params())
    leaves = {}
    for name, shape in shapes.items():
        if name not in files.home:
            raise CheckpointError(f"{path}: tensor {name!r} is missing")
        found = files.slice(name)[...]
        if found.shape != shape.shape:
            raise CheckpointError(f"{path}: tensor {name!r} has shape {found.shape}, takes {shape.shape}")
        leaves[name] = jnp.asarray(found, stored_dtype(name, dtype.name))
    ids = jnp.asarray(files.slice("ids")[...], jnp.int32) if "ids" in files.home else None
    return nested(leaves), ids


def save_drafter(directory: str | os.PathLike[str], drafter: TrainedDrafter,
                 dtype: jax.typing.DTypeLike = "bfloat16", facts: Mapping[str, Any] | None = None) -> None:
    """Writes a drafter to a directory that `load_drafter` reads, with the weights that models keep in float32 (see
    `decodax.models.weight_source.stored_dtype`) in that; `facts` are further entries of `config.json`."""
    kind = jnp.dtype(dtype).name
    tensors = {name: np.asarray(jnp.asarray(x, stored_dtype(name, kind)))
               for name, x in flatten(drafter.params).items()}
    if drafter.ids is not None:
        tensors["ids"] = np.asarray(drafter.ids, np.int32)
    write_files(Path(directory), tensors,
                {**(facts or {}), DRAFTER: drafter.system, "head": encoded(drafter.head)}, "np")


def encoded(value: Any) -> Any:
    """Returns a configuration as JSON values: a dataclass becomes a dictionary of the fields that differ from their
    defaults, with the name of its class under "class"."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        if type(value).__name__ not in PARTS:
            raise ValueError(f"head: got a {type(value).__name__} in its configuration, which cannot be saved")
        given = {f.name: getattr(value, f.name) for f in dataclasses.fields(value)}
        own = {f.name for f in dataclasses.fields(value) if f.default != given[f.name]}
        return {"class": type(value).__name__, **{k: encoded(v) for k, v in given.items() if k in own}}
    return [encoded(x) for x in value] if isinstance(value, tuple) else value


def decoded(value: Any) -> Any:
    """Returns the configuration that `encoded` converted to JSON values, the inverse of that function.

    Raises:
        CheckpointError: an unknown class, or a field that it does not have.
    """
    if isinstance(value, list):
        return tuple(map(decoded, value))
    if not isinstance(value, dict):
        return value
    given = {k: decoded(v) for k, v in value.items() if k != "class"}
    try:
        return PARTS[value["class"]](**given)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"config.json: head: {error}") from None
