"""APAR: a tuned model forks its own text, and all branches are generated in parallel (Liu et al., 2024)."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from decodax.common.options import Count, TokenId
from decodax.common.registry import SEARCHES
from decodax.common.struct import struct
from decodax.core.state import Status
from decodax.engine.request import Request
from decodax.sampling.base import Context, PyTree, Transform
from decodax.search.explorer import Explorer, Ranked
from decodax.search.forks import Forks

NUMBERED = re.compile(r"\d+\. ")


@struct
class ControlTokens(Transform):
    """Restricts where a thread of APAR may generate the control tokens `[Fork]` and `[Child]`.

    - `[Child]` is forced at the position `child_at` and forbidden elsewhere.
    - `[Fork]` is allowed if `may_fork` is True, but not directly after a control token, nor at the depth `deepest`. The
      depth of a text is 1 plus the number of `[Child]` tokens after its prompt.

    Attributes:
        fork: `i32[B]`, id of `[Fork]`.
        child: `i32[B]`, id of `[Child]`.
        deepest: `i32[B]`, maximum depth.
        child_at: `i32[B]`, position of `[Child]` in a row that is a new thread; -1 in other rows.
        may_fork: `bool[B]`, True if the row may generate `[Fork]`.
    """

    fork: Array
    child: Array
    deepest: Array
    child_at: Array
    may_fork: Array

    needs = "sequence"

    def logits(self, state: PyTree, ctx: Context, logits: Array) -> Array:
        place, token = jnp.arange(ctx.tokens.shape[0]), jnp.arange(logits.shape[-1])
        new = (place >= ctx.prompt_length) & (place < ctx.length)
        depth = 1 + ((ctx.tokens == self.child) & new).sum()
        newest = ctx.tokens[ctx.length - 1]
        forks = self.may_fork & (depth < self.deepest) & (newest != self.fork) & (newest != self.child)
        banned = (token == self.child) | ((token == self.fork) & ~forks)
        return jnp.where(ctx.length == self.child_at, jnp.where(token == self.child, 0.0, -jnp.inf),
                         jnp.where(banned, -jnp.inf, logits))


@dataclasses.dataclass
class Thread:
    """One branch of an answer of APAR.

    Attributes:
        path: token ids before the thread's own tokens: the prompt, the tokens of its ancestors up to the `[Fork]` at
            which this thread began, and `[Child]`.
        parent: index of the thread that forked this one; None for the main thread.
        tokens: the thread's own tokens, including each `[Fork]` and the token that ended it.
        forks: a pair for each child: the number of `tokens` up to its `[Fork]`, inclusive, and the child's index.
        status: why the thread ended.
        log_prob: log-probability of `tokens` under the model.
        rounds: number of rounds that the batch had run when the thread ended.
    """

    path: list[int]
    parent: int | None = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    forks: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    status: Status = Status.RUNNING
    log_prob: float = 0.0
    rounds: int = 0


@SEARCHES.register("apar", "APAR: LLMs Can Do Auto-Parallel Auto-Regressive Decoding", "Liu et al. 2024",
                   "a tuned model forks its own text, and all branches are written at once")
@dataclasses.dataclass(frozen=True)
class APAR(Explorer):
    """Auto-parallel auto-regressive decoding (Liu et al., 2024). The model must have been tuned for it (`to_apar`,
    `decodax.train.tuning.apar`).

    Where a thread generates `[Fork]`, a second thread begins with the same text and an appended `[Child]`. The child
    generates a detail, while its parent generates the text that follows the detail; neither attends to the other. All
    threads of all prompts are rows of one batch, and a child reuses the cache of its parent. The answer joins, at each
    `[Fork]`, the parent's text before it, the child's text, and the parent's text after it. The rules are those of the
    authors' code.

    `threads` limits the number of simultaneous threads of a prompt; the authors limit the number in the batch, but here
    the text of a prompt does not depend on other prompts. While all are in use, `[Fork]` is forbidden; threads that
    fork in the same round and find no free row wait for one.

    The main thread samples with the random key of the prompt's first sample. A child's key is derived from its parent's
    key and the length of its text, so that its text does not depend on rounds, rows or the algorithm.

    Attributes:
        fork: the control token `[Fork]`, by id or by name (`"[SplitMask]"` in the published models); None:
            `apar_fork_token` in the model's `config.json`, which `scripts/train.py tune --objective apar` writes.
        child: the control token `[Child]`, by id or by name (`"[SplitSop]"` in the published models); None:
            `apar_child_token` in `config.json`.
        threads: maximum number of simultaneous threads of a prompt.
        depth: maximum nesting depth of threads, the main one included.
        newlines: True repairs line breaks where texts are joined, as the authors' code does: two before the text after
            a child, and one before a child whose introduction has a number with a dot.
    """

    fork: TokenId | str | None = None
    child: TokenId | str | None = None
    threads: Count = 8
    depth: Count = 2
    newlines: bool = False

    @property
    def rows(self) -> int:
        return self.threads

    def begin(self, lm: Any, prompts: Any, **options: Any) -> Forks:
        fork, child = control_tokens(lm, self.fork, self.child)

        def amend(request: Request) -> Request:
            rows = request.policy.eos.shape[0]
            link = ControlTokens(**{name: jnp.full(rows, value, jnp.int32) for name, value in (
                ("fork", fork), ("child", child), ("deepest", self.depth), ("child_at", -1))},
                may_fork=jnp.zeros(rows, bool))
            # Before the other transforms, as in the authors' code.
            policy = request.policy
            return dataclasses.replace(request, policy=policy.replace(transforms=(link, *policy.transforms)))

        return Forks.begin(lm, prompts, self.rows, marks=[fork], amend=amend, **options)

    def search(self, forks: Forks, asked: Sequence[Any]) -> Ranked:
        fork, child = control_tokens(forks.job.request.lm, self.fork, self.child)
        shape = len(forks), self.rows
        trees = [[Thread(list(prompt))] for prompt in forks.prompts]
        held = np.full(shape, -1)               # index of the thread in each row
        held[:, 0] = 0
        forks.status[:, 1:] = Status.LENGTH     # rows without a thread
        child_at, queues = np.full(shape, -1), [[] for _ in range(len(forks))]      # type: ignore[var-annotated]
        waits = np.zeros(shape, bool)
        while True:
            self._end(forks, trees, held)
            if not (going := forks.live & (held >= 0)).any():
                break
            parents = np.tile(np.arange(self.rows), (len(forks), 1))
            for p, tree in enumerate(trees):
                for j in np.flatnonzero(held[p] < 0).tolist():
                    if not queues[p]:
                        break
                    i = queues[p].pop(0)
                    text = forks.prompts[p] + forks.tokens(p, i)
                    mother = tree[held[p, i]]
                    mother.forks.append((len(text) - len(mother.path), len(tree)))
                    tree.append(Thread([*text, child], int(held[p, i])))
                    parents[p, j], held[p, j], child_at[p, j] = i, len(tree) - 1, len(text)
                    waits[p, i] = False
            forks.fork(parents, by_text=True)
            going = forks.live & (held >= 0) & ~waits
            _tell(forks, child_at, (held < 0).any(1, keepdims=True) & ~waits.any(1, keepdims=True))
            # Up to the first row that ends or forks.
            forks.extend(going, fewest=int(going.sum()) - 1)
            for p, i in zip(*np.nonzero(going & forks.live), strict=True):
                if forks.tokens(p, i)[-1] == fork:
                    queues[p].append(int(i))
                    waits[p, i] = True
        newlines = self.newlines and forks.job.request.lm.tokenizer is not None
        texts = [[stitched(tree, fork, _reader(forks), newlines)] for tree in trees]
        return Ranked(np.array([[sum(thread.log_prob for thread in tree)] for tree in trees]), texts=texts,
                      details=trees)

    def _end(self, forks: Forks, trees: list[list[Thread]], held: np.ndarray) -> None:
        """Stores the text of finished threads in `trees`, and frees their rows."""
        ended = (held >= 0) & ~forks.live
        record = forks.job.state.record
        raw = np.asarray(record.raw) if record is not None and ended.any() else None
        for p, i in zip(*np.nonzero(ended), strict=True):
            thread = trees[p][held[p, i]]
            text = forks.prompts[p] + forks.tokens(p, i)
            thread.tokens, thread.status = text[len(thread.path):], Status(int(forks.status[p, i]))
            thread.rounds = forks.rounds
            if raw is not None:
                thread.log_prob = float(raw[p * self.rows + i, len(thread.path):len(text)].astype(np.float64).sum())
            held[p, i] = -1


def stitched(tree: Sequence[Thread], fork: int, read: Callable[[Thread, int, list[int], bool], Any],
             newlines: bool = False, which: int = 0) -> Any:
    """Returns the text of a thread with the texts of its children inserted where it forked, recursively.

    Args:
        tree: the threads of a prompt.
        fork: id of `[Fork]`.
        read: returns the text of a piece of a thread. It takes the thread, the index of the piece in its tokens, the
            tokens of the piece, and True for the last piece.
        newlines: True repairs line breaks between pieces; see `APAR`.
        which: index of the thread to begin with.
    """
    thread = tree[which]
    tokens = thread.tokens[:-1] if thread.status == Status.EOS else thread.tokens
    places = [at for at, _ in thread.forks]
    children = [stitched(tree, fork, read, newlines, child) for _, child in thread.forks]
    if tokens[-1:] == [fork] and len(tokens) not in places:     # the budget ended before the child began
        places.append(len(tokens))
        children.append(read(thread, len(tokens), [], True))
    pieces = [read(thread, first, [t for t in tokens[first:last] if t != fork], last == len(tokens))
              for first, last in itertools.pairwise((0, *places, len(tokens)))]
    text = pieces.pop()
    for piece, below in zip(pieces[::-1], children[::-1], strict=True):
        if newlines:
            if NUMBERED.search(piece) and not below.startswith("\n"):
                below = "\n" + below
            if not text.startswith("\n\n"):
                text = "\n\n" + text.lstrip("\n")
        text = piece + below + text
    return text


def _reader(forks: Forks) -> Callable[[Thread, int, list[int], bool], Any]:
    request = forks.job.request
    tokenizer = request.lm.tokenizer

    def read(thread: Thread, first: int, ids: list[int], last: bool) -> Any:
        if tokenizer is None:
            return ids
        stop = forks.stop if last and thread.status == Status.STOP else ()
        return tokenizer.continuation(thread.path + thread.tokens[:first], ids, stop=stop,
                                      skip_special_tokens=request.skip_special_tokens)

    return read


def control_tokens(lm: Any, fork: int | str | None, child: int | str | None) -> tuple[int, int]:
    """Returns the ids of the control tokens of APAR.

    Args:
        lm: the model.
        fork: `[Fork]`, as an id or a name; None: `apar_fork_token` in the model's `config.json`.
        child: `[Child]`, as an id or a name; None: `apar_child_token` there.

    Raises:
        ValueError: None, and the model says none; a name is not a single token of the model, or both ids are the same.
    """
    found = []
    for name, token in (("fork", fork), ("child", child)):
        if token is None and (token := lm.config_entries.get(f"apar_{name}_token")) is None:
            raise ValueError(f"'apar' needs {name}=, the control token that the model was tuned to write: its "
                             f"config.json has no apar_{name}_token")
        if isinstance(token, str):
            if lm.tokenizer is None:
                raise ValueError(f"{name}: got {token!r}, but the model has no tokenizer; takes an id")
            ids = lm.tokenizer.encode(token, add_special_tokens=False)
            if len(ids) != 1:
                raise ValueError(f"{name}: got {token!r}, which is {len(ids)} tokens; takes one that the model was "
                                 "tuned to write")
            token = ids[0]
        if isinstance(token, bool) or not 0 <= token < lm.vocab_size:
            raise ValueError(f"{name}: got {token!r}, takes a token from 0 to {lm.vocab_size - 1}")
        found.append(int(token))
    if found[0] == found[1]:
        raise ValueError(f"fork and child: got token {found[0]} for both, take different ones")
    return found[0], found[1]


def _tell(forks: Forks, child_at: np.ndarray, may_fork: Any) -> None:
    """Writes the position of `[Child]` in new threads, and which rows may fork, to the policy's `ControlTokens`."""
    job = forks.job
    link, *others = job.batch.policy.transforms
    assert isinstance(link, ControlTokens)
    at, may = np.full(job.state.batch, -1, np.int32), np.zeros(job.state.batch, bool)
    at[:forks.rows] = child_at.reshape(-1)
    may[:forks.rows] = np.broadcast_to(may_fork, child_at.shape).reshape(-1)
    link = link.replace(child_at=jax.device_put(at, link.child_at.sharding),
                        may_fork=jax.device_put(may, link.may_fork.sharding))
    job.batch.policy = job.batch.policy.replace(transforms=(link, *others))
