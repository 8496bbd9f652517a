"""Rows of one compiled batch that denoise canvases, and canvases that are kept so that rows can come back to them."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

import jax
import numpy as np

from decodax.common.struct import short
from decodax.core import drivers
from decodax.core.algorithm import name_of
from decodax.core.mesh import on_mesh
from decodax.core.state import State, Status
from decodax.engine.batch import Job, collect, host_rows
from decodax.engine.request import Request
from decodax.engine.result import Result

SIZE = 64
"""Canvases of a prompt in a part of the store. Parts have one size, so that it grows without new programs."""


@dataclasses.dataclass
class Canvases:
    """`n` rows of each of `P` prompts that denoise, and a store of canvases that they have denoised from.

    What is kept of a canvas is all that a row is, with its cache. Kept canvases have numbers, for each prompt from 0
    on; 0 is the one with which it begins.

    Attributes:
        job: the batch. n: rows of a prompt. store: canvases, `SIZE` of each prompt in each part. keys: of the rows'
            places.
        spent: positions that were denoised so far, of all rows. fed: none. generation: how often rows came back.
    """

    __repr__ = short

    job: Job
    n: int
    store: list[State]
    keys: Any
    spent: int = 0
    fed: int = 0
    generation: int = 0

    @classmethod
    def begin(cls, lm: Any, prompts: Any, n: int, **options: Any) -> Self:
        """Reads the prompts, and makes `n` rows of each.

        Raises:
            ValueError, TypeError: as `decodax.generate`; or a method that fills no canvas.
        """
        request = Request.read(lm, prompts, num_samples=n, **options)
        if not request.algorithm.traits.canvas:
            raise ValueError(f"algorithm: {name_of(request.algorithm)} fills no canvas; takes a masked "
                             "diffusion sampler")
        job = Job.begin(request)
        first: Any = np.repeat(np.arange(len(request), dtype=np.int32) * n, SIZE)
        with on_mesh(request.lm.mesh):
            store = drivers.kept(job.state, first)
        return cls(job, n, [store], job.state.key.copy())

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def prompts(self) -> list[list[int]]:
        return self.job.request.prompts

    @property
    def rows(self) -> int:
        return len(self) * self.n

    def rng(self, prompt: int) -> np.random.Generator:
        """Random numbers of a prompt at this generation: of its seed and address, whoever stands beside it."""
        r = self.job.request
        words = [*r.seeds[prompt].tolist(), int(r.request_ids[prompt]), self.generation]
        return np.random.default_rng(np.random.SeedSequence(words))

    def recall(self, numbers: np.ndarray, live: np.ndarray | None = None) -> None:
        """Row `i` of prompt `p` goes on from the canvas `numbers[p, i]`, by draws of its own.

        Args:
            live: `bool[P, n]`; the other rows stand still.
        """
        self.generation += 1
        live = np.ones(numbers.shape, bool) if live is None else live
        turn: Any = np.uint32(self.generation)
        for part, held in enumerate(self.store):
            if (here := live & (numbers // SIZE == part)).any():
                rows: Any = np.full(self.job.state.batch, -1, np.int32)
                rows[:self.rows] = np.where(here, self._places(numbers), -1).reshape(-1)
                with on_mesh(self.job.request.lm.mesh):
                    self.job.state = drivers.recall(self.job.state, held, rows, self.keys, turn)
        state = self.job.state
        status = np.array(state.status)
        status[:self.rows] = np.where(live.reshape(-1), status[:self.rows], np.int32(Status.TIME))
        with on_mesh(self.job.request.lm.mesh):
            self.job.state = state.replace(status=jax.device_put(status, state.status.sharding))

    def _places(self, numbers: np.ndarray) -> np.ndarray:
        """Rows within a part of the store."""
        return np.arange(len(self))[:, None] * SIZE + numbers % SIZE

    def denoise(self) -> tuple[np.ndarray, np.ndarray]:
        """One round of all rows that run.

        Returns:
            `i64[P, n]`, how many steps of denoising each row's canvas has behind it; `i32[P, n]`, the rows' status.
        """
        before = np.asarray(self.job.state.status) == Status.RUNNING
        open_ = self._open()
        self.job.advance(None, rounds=1)
        self.spent += int((open_ - self._open())[before].clip(min=0).sum())
        shape = len(self), self.n
        algo: Any = self.job.state.algo
        step = lambda x: np.asarray(x)[:self.rows].reshape(shape)
        return step(algo.round).astype(np.int64), step(self.job.state.status)

    def _open(self) -> np.ndarray:
        c: Any = self.job.state.algo
        inside = np.arange(c.open.shape[1]) < np.asarray(c.end)[:, None]
        return (np.asarray(c.open) & inside).sum(1)

    def keep(self, numbers: np.ndarray) -> None:
        """Keeps the canvases of rows under `numbers` (`i64[P, n]`, all different); -1: nothing is kept of the row."""
        while numbers.max() >= len(self.store) * SIZE:
            self.store.append(jax.tree.map(lambda x: x.copy(), self.store[0]))
        for part in range(len(self.store)):
            if (here := (numbers >= 0) & (numbers // SIZE == part)).any():
                beyond = np.int32(len(self) * SIZE)
                rows: Any = np.full(self.job.state.batch, beyond, np.int32)
                rows[:self.rows] = np.where(here, self._places(numbers), beyond).reshape(-1)
                with on_mesh(self.job.request.lm.mesh):
                    self.store[part] = drivers.put(self.store[part], self.job.state, rows)

    def texts(self) -> list[list[Any]]:
        """The new text of each row; ids without a tokenizer."""
        result = self.result()
        flat = result.text if result.text is not None else [result.row(i).tolist() for i in range(len(result))]
        return [list(flat[p * self.n:(p + 1) * self.n]) for p in range(len(self))]

    def result(self) -> Result:
        """All rows as `decodax.generate` gives them."""
        job = self.job
        with on_mesh(job.request.lm.mesh):
            s = host_rows(drivers.outcome(job.algorithm, job.state), np.arange(self.rows))
        status = np.where(s.status == Status.RUNNING, np.int32(Status.TIME), s.status)
        result = collect(job.request, s, status, {})
        return dataclasses.replace(result, stats=dataclasses.replace(
            result.stats, forwards=job.forwards, prefill_forwards=job.prefill_forwards, seconds=job.seconds,
            prefill_seconds=job.prefill_seconds))
