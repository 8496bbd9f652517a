"""Plans whether a job fits a slice, and how fast it can be at best."""

from __future__ import annotations

import dataclasses
import importlib.util
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from decodax.bench.plan.aot import Compiled, compile_round, devices
from decodax.bench.plan.count import DeviceCounts, count, setup
from decodax.bench.plan.hardware import Slice, slice_of
from decodax.bench.plan.presets import PRESETS
from decodax.common.axes import by_axes, replicas
from decodax.common.progress import bar
from decodax.common.strings import near
from decodax.io.files import read_json
from decodax.io.gguf import Gguf
from decodax.io.gguf.weights import FLOATS
from decodax.io.load import LM, find
from decodax.models.diffusion import read_diffusion
from decodax.models.families import read_config
from decodax.models.transformer import Transformer

COLUMNS = ("slice", "mesh", "weights", "cache", "temporaries", "free", "largest batch", "tokens a round", "moved",
           "memory", "arithmetic", "network", "round", "tokens/s", "device-s/Mtoken")

SLACK = 0.02
"""The share of a device's memory that is left free, for programs and fragmentation, when `Plan.largest` is computed."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """A job on one mesh of one slice. Sizes are in bytes and times in seconds, for one device and one round.

    Attributes:
        slice: the slice.
        mesh: number of devices along the data axis, along the model axis, and perhaps along the expert axis.
        batch: the number of rows over all replicas.
        capacity: the number of slots of a row.
        live: the number of slots of a row that are in use.
        width: the number of tokens that a round scores for a row.
        counts: the counts from shapes.
        compiled: figures of XLA's compiler; None if it was not used.
        temporaries: memory for temporary arrays, from the compiled program, or an estimate from the logits and
            activations of all tokens.
        free: the device's remaining memory; negative if the job does not fit. It ignores what is in the host's memory
            (`counts.host`), whose size is unknown here.
        largest: the maximum number of rows that fit; 0 if not even one fits.
        memory: the minimum time for memory traffic.
        arithmetic: the minimum time for arithmetic.
        network: the minimum time for collectives. `seconds` is the larger of `memory` and `arithmetic`, plus this.
        prompt: the minimum time for a row's prompt of `live` tokens.
        swap: the minimum time to move the cache of that prompt to the host's memory, or back; None if the maker does
            not publish the speed.
        tokens: new tokens for each row and round, from which `tokens_per_second` is computed.
        price: the price of a device for an hour; None if not given.
    """

    slice: Slice
    mesh: tuple[int, ...]
    batch: int
    capacity: int
    live: int
    width: int
    counts: DeviceCounts
    compiled: Compiled | None
    temporaries: float
    free: float
    largest: int
    memory: float
    arithmetic: float
    network: float
    prompt: float
    swap: float | None
    tokens: float
    price: float | None

    @property
    def fits(self) -> bool:
        return self.free >= 0 and (self.compiled is None or self.compiled.fits)

    @property
    def padded(self) -> float | None:
        """Memory of the arguments, with the padding of tiles, relative to the counted weights and cache; None if not
        compiled."""
        held = self.counts.weights + self.counts.draft + self.counts.cache
        return self.compiled.arguments / held if self.compiled is not None and self.compiled.fits else None

    @property
    def seconds(self) -> float:
        """The minimum time of a decoding round, in seconds: the longer one of arithmetic and memory traffic, which
        overlap, plus that of collectives, which do not."""
        return max(self.memory, self.arithmetic) + self.network

    @property
    def tokens_per_second(self) -> float:
        """The maximum number of tokens per second over all rows."""
        return self.batch * self.tokens / self.seconds

    @property
    def device_seconds(self) -> float:
        """The minimum device time for a million tokens, summed over all devices."""
        return 1e6 * math.prod(self.mesh) / self.tokens_per_second

    @property
    def cost(self) -> float | None:
        """The minimum cost of a million tokens; None without a price."""
        return None if self.price is None else self.device_seconds * self.price / 3600

    def cells(self) -> tuple[str, ...]:
        """Returns the plan as texts, one for each of `COLUMNS`."""
        estimated = "" if self.compiled is not None else "~"
        gb = lambda n: f"{n / 1e9:.2f} GB"
        ms = lambda x: f"{1e3 * x:.2f} ms"
        cost = f"{self.device_seconds:,.0f}" + (f" (${self.cost:.2f})" if self.cost is not None else "")
        return (self.slice.name, by_axes(self.mesh), gb(self.counts.weights + self.counts.draft),
                gb(self.counts.cache), estimated + gb(self.temporaries),
                gb(self.free) if self.fits else "does not fit", f"{self.largest:,}", f"{self.tokens:g}",
                gb(self.memory * self.slice.device.bandwidth), ms(self.memory), ms(self.arithmetic), ms(self.network),
                ms(self.seconds), f"{self.tokens_per_second:,.0f}" if self.fits else "-", cost if self.fits else "-")

    def json(self) -> dict[str, Any]:
        """Returns the plan as plain data for JSON."""
        own = dataclasses.asdict(self)
        own["slice"] = {"name": self.slice.name, "devices": self.slice.count, "device": own["slice"]["device"]}
        if own["compiled"]:
            del own["compiled"]["text"]
        return own | {"fits": self.fits, "seconds": self.seconds, "padded": self.padded, "cost": self.cost,
                      "tokens_per_second": self.tokens_per_second, "device_seconds": self.device_seconds}


def abstract(name: str | Path | Mapping[str, Any], dtype: str = "bfloat16") -> LM:
    """Returns a model without weights.

    Args:
        name: a preset of `PRESETS`, a shipped model, a directory with a config.json (the weights need not be there), a
            GGUF file, or the contents of a config.json.
        dtype: the dtype of the model.

    Raises:
        ValueError: the name is none of these, or the architecture is not supported.
    """
    config = _config(name)
    model: Any = Transformer(read_config(dict(config)), dtype=dtype)
    return LM(model=model, params=model.abstract_params(dtype), vocab_size=model.config.vocab,
              name=name if isinstance(name, str) else "model", diffusion=read_diffusion(config))


def _config(name: str | Path | Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the entries of the config.json of a model, given as to `abstract`."""
    if isinstance(name, Mapping):
        return name
    if str(name) in PRESETS:
        return PRESETS[str(name)]
    try:
        path = find(name)
    except (ValueError, FileNotFoundError) as error:
        raise ValueError(f"model: got {str(name)!r}, takes a directory with a config.json, a GGUF file, a shipped "
                         f"model, or a preset ({near(str(name), PRESETS)})") from error
    return Gguf.open(path).entries if path.is_file() else read_json(path / "config.json")


def _packed(model: str | Path) -> str | None:
    """Returns the name of the format in which the weights of a directory or a GGUF file are packed; None for arrays and
    presets."""
    if str(model) not in PRESETS and (path := find(model)).is_file():
        types = {tensor.type for tensor in Gguf.open(path).file.tensors.values()} - FLOATS.keys()
        return ", ".join(sorted(types)) or None
    return (_config(model).get("quantization_config") or {}).get("quant_method")


def meshes(count: int, batch: int) -> list[tuple[int, int]]:
    """Returns the meshes of `count` devices whose replicas divide `batch` rows evenly, as pairs of replicas and devices
    for each replica.

    >>> meshes(8, 4)
    [(1, 8), (2, 4), (4, 2)]
    """
    return [(d, count // d) for d in range(1, count + 1) if count % d == 0 and batch % d == 0]


def plan(model: str | Path | LM, topology: str | Sequence[str], *, batch: int = 16, capacity: int = 8192,
         live: int | None = None, max_new_tokens: int | None = None, mesh: Iterable[tuple[int, ...]] | None = None,
         algorithm: Any = None, draft: str | Path | LM | None = None, cache: Any = None, weights: str | None = None,
         dtype: str = "bfloat16", tokens_per_round: float = 1.0, price: Mapping[str, float] | None = None,
         compile: bool | None = None, progress: bool = False, **sampling: Any) -> list[Plan]:
    """Plans a job on each mesh of each slice: its memory, and the minimum time of a round. No array is allocated.

    The bytes and matrix products of a round (`advance`, the program of `generate`) are counted from its shapes. For
    TPUs XLA's own compiler then compiles the round, if `pip install decodax[tpu-aot]` has installed it, and reports the
    memory of arguments and temporaries, bytes moved, collectives, and whether the program fits.

    Times are lower bounds: bytes divided by bandwidth, matrix products divided by the peak rate for 16-bit numbers, and
    ring all-reduces over the model axis. No program is faster; plain decoding of a large model comes close.

    Args:
        model: a preset such as "llama-3-8b", a directory with a config.json, a GGUF file, or a model.
        topology: slices such as "v5e:2x4", "v6e:2x2", "h100:8"; "here" is this machine, measured.
        batch: the number of rows over all replicas.
        capacity: the number of slots of a row, for prompt and answer.
        live: the number of slots that are in use in the timed round; default all.
        max_new_tokens: number of slots for the answer, on which the size of some caches depends; default a quarter of
            `capacity`, at most 256.
        mesh: the number of devices along the data axis and along the model axis of each mesh, with a third number also
            along the expert axis; default all meshes of all devices with the first two axes.
        algorithm: as in `decodax.generate`.
        draft: the algorithm's draft model.
        cache: as in `decodax.generate`.
        weights: a format of `decodax.models.formats`, such as "int8"; default `dtype`, with a warning if the model's
            own weights are packed.
        dtype: the dtype of the model.
        tokens_per_round: new tokens for each row and round, as measured with `decodax compare`; 1 for plain decoding.
        price: price of a device for an hour, by device, such as `{"v5e": 1.2}`.
        compile: whether to use XLA's compiler; by default for TPUs if libtpu is installed.
        progress: whether to show a progress bar.
        sampling: as in `decodax.generate`: temperature, top_p, ...

    Returns:
        The plans: first those that fit, ordered by cost, or by device time if a price is missing.

    Raises:
        ValueError: a name is unknown, or an argument is out of range.
    """
    lm = model if isinstance(model, LM) else abstract(model, dtype)
    if weights is None and not isinstance(model, LM) and (packed := _packed(model)):
        warnings.warn(f"model: the weights of {model} are packed ({packed}), and planned as {dtype}; weights= names a "
                      "packed format to plan with", stacklevel=2)
    if not isinstance(lm.model, Transformer):
        raise ValueError(f"model: got a {type(lm.model).__name__}, takes a Transformer")
    for name, value in (("batch", batch), ("capacity", capacity), ("live", live), ("max_new_tokens", max_new_tokens)):
        if value is not None and value < 1:
            raise ValueError(f"{name}: got {value}, takes at least 1")
    for name, value in (("live", live), ("max_new_tokens", max_new_tokens)):
        if value is not None and value > capacity:
            raise ValueError(f"{name}: got {value}, takes at most the capacity {capacity}")
    if not tokens_per_round > 0:
        raise ValueError(f"tokens_per_round: got {tokens_per_round}, takes more than 0")
    if draft is not None:
        from decodax import algorithms
        if not isinstance(algorithm, str):
            raise ValueError("draft: can only be given with an algorithm by name")
        name, options = algorithms.parse(algorithm)
        algorithm = algorithms.make(name, lm, draft if isinstance(draft, LM) else abstract(draft, dtype), **options)
    slices = [slice_of(name) for name in ([topology] if isinstance(topology, str) else topology)]
    chosen = [(s, m) for s in slices for m in (meshes(s.count, batch) if mesh is None else mesh)]
    for s, m in chosen:
        if math.prod(m) > s.count:
            raise ValueError(f"mesh: got {by_axes(m)}, takes at most the {s.count} devices of {s.name}")
    present = importlib.util.find_spec("libtpu") is not None
    if compile and not present:
        raise ValueError("compile: needs libtpu; pip install 'decodax[tpu-aot]'")
    done = []
    with bar(progress, "planning", len(chosen)) as report:
        for i, (s, m) in enumerate(chosen):
            real = s.tpu and (present if compile is None else compile)
            where = devices(s.name)[:math.prod(m)] if real else None
            one = setup(lm, where, m, batch=batch, capacity=capacity, live=live, new=max_new_tokens,
                        algorithm=algorithm, cache=cache, weights=weights, sampling=sampling)
            done.append(_plan(one, s, m, batch, compile_round(one) if real else None, tokens_per_round,
                              (price or {}).get(s.device.name)))
            report(i + 1)
    priced = all(p.cost is not None for p in done)
    return sorted(done, key=lambda p: (not p.fits, (p.cost or 0.0) if priced else p.device_seconds))


def _plan(s: Any, where: Slice, mesh: tuple[int, ...], batch: int, compiled: Compiled | None, tokens: float,
          price: float | None) -> Plan:
    c = count(s)
    config, nodes = s.lm.model.config, s.rows * s.width
    estimate = nodes * (3 * 4 * config.vocab / mesh[1] + 16 * config.width) + 32e6
    known = compiled is not None and compiled.fits
    temporaries = float(compiled.temporaries) if known and compiled is not None else estimate
    held = float(compiled.arguments) if known and compiled is not None else float(c.weights + c.draft + c.cache)
    memory = where.device.memory
    fixed = c.weights + c.draft
    row = (held - fixed + temporaries) / s.rows
    largest = max(0, int((memory * (1 - SLACK) - fixed) / row)) * replicas(s.mesh) if row > 0 else batch
    times = c.seconds(where.device, compiled.moved if known and compiled is not None else None)
    device = where.device
    prompt = max(c.prompt_flops / device.flops, c.weights_read / device.bandwidth)
    swap = None if device.host is None else c.row_cache / device.host
    return Plan(where, mesh, batch, s.capacity, s.live, s.width, c, compiled, temporaries,
                memory - held - temporaries, largest, *times, prompt, swap, tokens, price)
