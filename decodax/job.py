"""A batch on its way through the compiled drivers: what `generate` and `stream` share."""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from decodax.autoregressive import Autoregressive
from decodax.core import drivers, keys
from decodax.core.state import State, Status
from decodax.core.stops import StopTable, stop_strings
from decodax.core.types import Algorithm, Params
from decodax.diffusion.entries import default as fills
from decodax.io.load import LM
from decodax.policy import Policy, from_generation_config
from decodax.policy.guidance import guide
from decodax.result import Result, Statistics, log_probs, new_tokens
from decodax.sharding import place


@dataclasses.dataclass
class Job:
    """A batch on its way: the compiled drivers, and the clock. The state is donated from burst to burst."""

    lm: LM
    algorithm: Algorithm
    model: Any
    params: Params
    policy: Policy
    state: State
    prompts: list[list[int]]
    stop: str | Sequence[str] | None
    prefill_forwards: int
    prefill_seconds: float
    seconds: float = 0.0
    forwards: int = 0
    burst: int = 1
    status: np.ndarray = dataclasses.field(default_factory=lambda: np.zeros(1, np.int32))

    @classmethod
    def begin(cls, lm: LM, ids: list[list[int]], *, max_new_tokens: list[int | None], min_new_tokens: list[int],
              seed: list[int], request_ids: list[int], negative: list[list[int]] | None, algorithm: Algorithm | None,
              num_samples: int, stop: str | Sequence[str] | None, logprobs: int | None, chunk: int,
              guidance_scale: float | None, sampling: dict[str, Any], given: list[list[int]] | None = None) -> Job:
        """Builds the policy, prefills the prompts and fans out the samples. `given`: what stands behind the prompts in
        the token buffer, for canvases that read it (`Template`)."""
        if algorithm is None:
            algorithm = Autoregressive() if lm.diffusion is None else fills(lm)
        elif lm.diffusion is not None and lm.diffusion.attention == "full" and not hasattr(algorithm, "adapter"):
            raise ValueError(f"algorithm: got {type(algorithm).__name__} for {lm.name!r}, which fills masks and sees "
                             "both sides of them; takes a sampler of masked diffusion, such as system('llada', lm)")
        for name, value, low in (("num_samples", num_samples, 1), ("chunk", chunk, 1), ("logprobs", logprobs or 0, 0)):
            if value < low:
                raise ValueError(f"{name}: got {value}, takes {low} or more")
        default = lm.generation_config.get("max_new_tokens") or 64
        budget = [default if n is None else n for n in max_new_tokens]
        for name, values in (("max_new_tokens", budget), ("min_new_tokens", min_new_tokens)):
            if min(values) < 0:
                raise ValueError(f"{name}: got {min(values)}, takes 0 or more")
        lengths = np.array([len(row) for row in ids], np.int32)
        longest = max(n + new for n, new in zip(lengths, budget, strict=True))
        limit = getattr(lm.model, "max_positions", None)
        if limit is not None and longest > limit:
            raise ValueError(f"max_new_tokens: prompt and new tokens are {longest}, the model has {limit} positions")
        trained = getattr(getattr(lm.model, "config", None), "context", longest)
        if longest > trained:
            warnings.warn(f"max_new_tokens: prompt and new tokens are {longest}, the model was made for {trained}",
                          stacklevel=4)
        if hasattr(algorithm, "fit"):       # a window as long as the text
            algorithm = algorithm.fit(max(budget))
        size = bucket(int(longest))
        tokens = np.zeros((len(ids), size), np.int32)
        for row, prompt, more in zip(tokens, ids, given or [[]] * len(ids), strict=True):
            row[:len(prompt) + len(more)] = [*prompt, *more]

        clock = time.perf_counter()
        config = {k: v for k, v in lm.generation_config.items() if k != "guidance_scale"}
        guidance_scale = lm.generation_config.get("guidance_scale") if guidance_scale is None else guidance_scale
        policy = from_generation_config(
            config, batch=len(ids), vocab_size=lm.vocab_size,
            max_length=lengths + np.array(budget, np.int32), min_new_tokens=np.array(min_new_tokens, np.int32),
            **{"eos_token_id": lm.eos, **sampling})
        if strings := stop_strings(stop):
            if lm.tokenizer is None:
                raise ValueError("stop: stop strings need a tokenizer, and this model has none")
            policy = policy.replace(stops=StopTable.build(lm.tokenizer.token_bytes(), strings, lm.vocab_size))
        # a draft's weights travel as data; the programs are compiled for the method alone
        model, params = lm.model, Params(target=lm.params, draft=getattr(algorithm, "weights", None))
        algorithm = algorithm.bare() if hasattr(algorithm, "bare") else algorithm
        seeds = np.array(seed, np.int64).astype(np.uint32)       # negative and large ones wrap around
        with on_mesh(lm.mesh):
            tokens, policy = place(lm.mesh, tokens), place(lm.mesh, policy)
            s = drivers.begin(algorithm, model, params, policy, tokens, lengths, size=size, seed=seeds,
                              max_new=np.array(budget, np.int32), min_new=np.array(min_new_tokens, np.int32),
                              request=np.array(request_ids, np.uint32), sample=np.zeros(len(ids), np.uint32),
                              top_logprobs=logprobs)
            forwards = 0
            if getattr(algorithm, "prefills", algorithm.caches) and lengths.max() > 1:
                width = min(max(_power(int(lengths.max()) - 1), 16), chunk, size)     # few widths, few programs
                forwards = -(-(int(lengths.max()) - 1) // width)
                s = drivers.prefill(algorithm, model, params, s, width=width)
            if guidance_scale is not None and guidance_scale != 1:
                model, s = guide(algorithm, model, params, policy, s, guidance_scale, negative)
            if num_samples > 1:
                repeat = lambda x: np.repeat(np.asarray(x), num_samples)
                each = keys.row_keys(jnp.asarray(repeat(seeds)), jnp.asarray(repeat(np.array(request_ids, np.uint32))),
                                     jnp.asarray(np.tile(np.arange(num_samples, dtype=np.uint32), len(ids))))
                s, policy = drivers.fan_out(s, policy, each, samples=num_samples)
            # no round at all: compiles the loop, if it must, before the decode clock starts
            s = drivers.advance(algorithm, model, params, policy, s, jnp.int32(0))
            jax.block_until_ready(s.length)
        job = cls(lm, algorithm, model, params, policy, s, [p for p in ids for _ in range(num_samples)], stop, forwards,
                  time.perf_counter() - clock)
        job.status = np.asarray(s.status)
        return job

    @property
    def running(self) -> bool:
        return bool((self.status == Status.RUNNING).any())

    @property
    def finished(self) -> int:
        return int((self.status != Status.RUNNING).sum())

    def advance(self, seconds: float | None, rounds: int | None = None) -> None:
        """Runs to the end, or for about this long, or so many rounds."""
        clock = time.perf_counter()
        budget = int(np.asarray(self.state.max_length - self.state.length).max())
        # each round of a running row makes progress, at least one position in `emits` of a canvas
        bound = 2 * (budget + self.algorithm.emits) + 8
        if hasattr(self.algorithm, "most_rounds"):
            bound = self.algorithm.most_rounds(budget, len(self.status))
        whole = seconds is None and rounds is None
        rounds = bound if whole else min(self.burst if rounds is None else rounds, bound)
        with on_mesh(self.lm.mesh):
            self.state = drivers.advance(self.algorithm, self.model, self.params, self.policy, self.state,
                                         jnp.int32(rounds))
        self.status = np.asarray(self.state.status)
        spent = time.perf_counter() - clock
        self.seconds += spent
        # the row that runs longest took part in each of them, or waited while rows of another kind did
        stats = self.state.stats
        self.forwards = int((np.asarray(stats.rounds) + np.asarray(stats.waited)).max())
        if self.running and whole:
            raise RuntimeError(f"{self.algorithm}: rows still running after {rounds} rounds; it makes no progress")
        if seconds is not None and spent < seconds:
            self.burst = min(self.burst * 2, 256)

    def result(self) -> Result:
        """What came out."""
        tokens, lengths = new_tokens(self.state, self.lm.pad)
        text = None
        if self.lm.tokenizer is not None:
            rows = zip(self.prompts, tokens, lengths, np.asarray(self.state.min_new), strict=True)
            text = [self.lm.tokenizer.continuation(p, row[:n].tolist(), stop=self.stop, min_new=int(least))
                    for p, row, n, least in rows]
        stats = {k: np.asarray(getattr(self.state.stats, k)).astype(np.int64)
                 for k in ("rounds", "drafted", "accepted", "histogram")}
        return Result(tokens=tokens, lengths=lengths, status=[Status(int(x)) for x in self.status], text=text,
                      logprobs=log_probs(self.state),
                      stats=Statistics(forwards=self.forwards, prefill_forwards=self.prefill_forwards,
                                       tokens=lengths.astype(np.int64), seconds=self.seconds,
                                       prefill_seconds=self.prefill_seconds, **stats))


def on_mesh(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """The context in which arrays are laid out on `mesh`."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)


def bucket(length: int) -> int:
    """The buffer size for sequences of this length: powers of two from 64 to 1,024, then multiples of 1,024.

    Programs are compiled once a size; a step costs what the rows hold, not what the buffer would.

    >>> [bucket(n) for n in (5, 65, 1000, 1025)]
    [64, 128, 1024, 2048]
    """
    return max(_power(length), 64) if length <= 1024 else -(-length // 1024) * 1024


def _power(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
