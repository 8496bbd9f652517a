"""Rows of one compiled batch that denoise canvases, and a store of canvases from which rows can continue later."""

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
from decodax.engine.batch import Job, collect
from decodax.engine.request import Request
from decodax.engine.result import Result
from decodax.search.text_rows import prompt_words

SIZE = 64
"""Number of canvases of a prompt in a part of the store. Parts have one size, so that it grows without recompiling."""


@dataclasses.dataclass
class Canvases:
    """`n` rows for each of `P` prompts that denoise canvases, and a store of intermediate canvases.

    A stored canvas is the complete decoding state of a row, with its cache. The stored canvases of a prompt are
    numbered from 0; canvas 0 is the initial one.

    Attributes:
        job: the batch.
        n: number of rows of a prompt.
        store: the stored canvases; each state in the list holds `SIZE` canvases of each prompt.
        keys: random key of each row.
        spent: number of positions that all rows together have unmasked so far.
        fed: always 0; canvases take no text from outside.
        generation: number of calls of `recall` so far.
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
        """Prefills the prompts, and makes `n` rows for each.

        Raises:
            ValueError: as in `decodax.generate`, or the algorithm does not denoise a canvas.
            TypeError: as in `decodax.generate`.
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
        """Returns a random generator for a prompt, seeded by its seed, its request id and the current generation."""
        words = [*prompt_words(self.job.request, prompt), self.generation]
        return np.random.default_rng(np.random.SeedSequence(words))

    def recall(self, numbers: np.ndarray, live: np.ndarray | None = None) -> None:
        """Lets row `i` of prompt `p` continue from the stored canvas `numbers[p, i]`, with new random numbers.

        Args:
            numbers: `i64[P, n]`.
            live: `bool[P, n]`; rows that are False are paused. None: no row is.
        """
        self.generation += 1
        live = np.ones(numbers.shape, bool) if live is None else live
        turn: Any = np.full(self.job.state.batch, self.generation, np.uint32)
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
        """Returns the index of each canvas within its part of the store, `i64[P, n]`."""
        return np.arange(len(self))[:, None] * SIZE + numbers % SIZE

    def denoise(self) -> tuple[np.ndarray, np.ndarray]:
        """Runs one denoising step of all running rows.

        Returns:
            `i64[P, n]`, the number of denoising steps of each row's canvas so far; `i32[P, n]`, the status of the rows.
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
        """Stores the canvases of rows under `numbers` (`i64[P, n]`, all different); -1 stores nothing."""
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
        """Returns the new text of each row, `[P][n]`; token ids if the model has no tokenizer."""
        result = self.result()
        flat = result.text if result.text is not None else [result.row(i).tolist() for i in range(len(result))]
        return [list(flat[p * self.n:(p + 1) * self.n]) for p in range(len(self))]

    def result(self) -> Result:
        """Returns all rows as a result of `decodax.generate`; rows that still run get `Status.TIME`."""
        s = jax.tree.map(lambda x: x[:self.rows], self.job.batch.outcome()[0])
        status = np.where(s.status == Status.RUNNING, np.int32(Status.TIME), s.status)
        return self.job.timed(collect(self.job.request, s, status, {}), self.job.forwards)
