"""Lattice decoding: best-first search whose texts share nodes, so that few model calls represent a large number of
texts.

Source: Xu, Jonnalagadda and Durrett, 2022, "Massive-scale Decoding for Text Generation using Lattices".
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from decodax.common.arguments import whole
from decodax.common.registry import FUNCTIONS
from decodax.engine.methods import model
from decodax.io.load import LM
from decodax.search.forks import Forks
from decodax.search.recombination import Following, Growing, Path, Recombination, TextLattice


class _Rows:
    """Runs the model on the texts that the searches ask for, with a few rows for each prompt.

    For a text, the row with the longest common prefix is forked over the least recently used row. The copy is truncated
    to that prefix, fed the rest of the text, and continued greedily.
    """

    def __init__(self, forks: Forks, k: int) -> None:
        self.forks, self.k = forks, k
        self.held: list[list[list[int]]] = [[[] for _ in range(forks.n)] for _ in range(len(forks))]
        self.used = [list(range(forks.n)) for _ in range(len(forks))]       # least recently used first
        self.read = [0] * len(forks)

    def __call__(self, wanted: dict[int, Path]) -> dict[int, dict[Path, Following]]:
        """Returns the most likely next tokens of the requested text of each prompt, and of the texts that its row then
        generated."""
        forks = self.forks
        shape = len(forks), forks.n
        parents, back = np.tile(np.arange(forks.n), (len(forks), 1)), np.full(shape, -1)
        active = np.zeros(shape, bool)
        rest: list[list[list[int] | None]] = [[None] * forks.n for _ in range(len(forks))]
        for p, path in wanted.items():
            common = [_common(path, text) for text in self.held[p]]
            source = int(np.argmax(common))
            i = self.used[p].pop(0)
            self.used[p].append(i)
            parents[p, i], active[p, i], back[p, i] = source, True, common[source]
            rest[p][i] = list(path[common[source]:])
            self.read[p] += len(path) - common[source]
        forks.fork(parents)
        forks.rewind(back)
        forks.feed(rest)
        forks.extend(active)
        record = forks.job.state.record
        assert record is not None
        # A record may hold more than was asked for.
        ids, log_p = np.asarray(record.top_ids)[..., :self.k], np.asarray(record.top, np.float64)[..., :self.k]
        out: dict[int, dict[Path, Following]] = {}
        for p, path in wanted.items():
            i = self.used[p][-1]
            text = self.held[p][i] = forks.tokens(p, i)
            self.read[p] += len(text) - len(path)
            row, start = p * forks.n + i, len(forks.prompts[p])
            out[p] = {}
            for at in range(len(path), len(text)):
                real = np.isfinite(log_p[row, start + at])
                out[p][tuple(text[:at])] = (ids[row, start + at][real].tolist(), log_p[row, start + at][real].tolist())
        return out


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@FUNCTIONS.register("search.lattice_decode", "Massive-scale Decoding for Text Generation using Lattices",
                    "Xu, Jonnalagadda and Durrett 2022", "very many texts in one lattice, with few model calls")
def lattice_decode(lm: LM | Any, prompts: Any, *, calls: int = 256, k: int = 5, merge: str = "zip", suffix: int = 4,
                   gap: int = 5, length_penalty: float = 0.0, max_new_tokens: int = 32, rows: int = 4,
                   step_tokens: int = 8, eos_token_id: int | Sequence[int] | None = None, cache: Any = None,
                   reads: Callable[[int], Hashable] | None = None) -> list[TextLattice]:
    """Lattice decoding (Xu, Jonnalagadda and Durrett, 2022): best-first search with depth-first completion and
    recombination.

    The best unfinished text is taken from a queue and continued greedily to its end. At each token, the others of the
    `k` most likely tokens enter the queue. Their priority is the log-probability of their text divided by its length to
    the power of `length_penalty`. A greedy token is merged with an earlier one if both texts are longer than `suffix`
    tokens, end with the same `suffix` tokens, and differ in length by less than `gap`, unless the merge would create a
    loop. The text ends at the merged token.

    - With "rcb", the earlier node gets another parent.
    - With "zip", the two nodes become one, and so do the nodes before them as far as the suffix reaches. Queued texts
      that continue a node that was merged into another are dropped.

    The search ends when the model has been called `calls` times; a text that has begun is completed.

    The next-token distribution at a merged node is that of the first text that reached it. The model has never
    processed most paths of a lattice as a whole text: this is the approximation of the paper.

    Lengths count one token of the prompt, as the paper's lengths count the first token of a decoder. Where the authors'
    code differs from the paper, this function follows the paper. The code adds `suffix` to the length of the earlier
    text; its "zip" leads from the earlier node to the later one and loses the parents of the earlier one; it looks for
    loops only 10 tokens back; it gives up a text for which "zip" would create a loop; and it continues beyond the
    maximum length. There a full stop also ends a text; here only `eos_token_id` does.

    Prompts are searched side by side and independently. Log-probabilities are those of the model, without a policy.

    Args:
        lm: the model.
        prompts: one or several.
        calls: number of model calls for each prompt.
        k: number of most likely next tokens that are considered.
        merge: "zip" or "rcb".
        suffix: number of equal tokens that a merge requires, `n` in the paper; at least 2.
        gap: the lengths of merged texts differ by less than this; at least 1.
        length_penalty: exponent of the length in a priority; at least 0.
        max_new_tokens: maximum number of new tokens of a text.
        rows: number of texts of a prompt whose cache is kept; with fewer rows, more tokens are processed again.
        step_tokens: number of tokens that a row generates between two checks for merges. Tokens after a merge are
            dropped; with 1 there are none.
        eos_token_id: tokens that end a text; None: those of the model.
        cache: as in `generate`; it must support truncation.
        reads: returns a key of a token id; of next tokens with equal keys only the most likely one is considered. None:
            the token's text in lower case without surrounding white space, as in the authors' code, or the id if there
            is no tokenizer.

    Raises:
        ValueError: a number out of its range, an unknown merge, a cache without truncation, or as in `generate`.

    >>> import decodax as dx
    >>> found, = dx.search.lattice_decode("pycode", "def area(", calls=40)                  # doctest: +SKIP
    >>> found.count, found.calls                                                            # doctest: +SKIP
    """
    lm = model(lm)
    if merge not in ("zip", "rcb"):
        raise ValueError(f"merge: got {merge!r}, takes 'zip' or 'rcb'")
    if not length_penalty >= 0:
        raise ValueError(f"length_penalty: got {length_penalty!r}, takes 0 or more")
    rule = Recombination(whole("calls", calls, 1), whole("k", k, 1, lm.vocab_size), merge, whole("suffix", suffix, 2),
                         whole("gap", gap, 1), float(length_penalty), whole("max_new_tokens", max_new_tokens, 1))
    given: dict[str, Any] = {} if cache is None else {"cache": cache}
    if eos_token_id is not None:
        given["eos_token_id"] = eos_token_id
    forks = Forks.begin(lm, prompts, whole("rows", rows, 1), step_tokens=whole("step_tokens", step_tokens, 1),
                        max_new_tokens=rule.longest, logprobs=rule.k, **given)
    if "truncation" not in forks.job.state.cache.supports:
        raise ValueError(f"cache: got a {type(forks.job.state.cache).__name__}, takes one that supports truncation")
    ends = lm.eos if eos_token_id is None else [eos_token_id] if isinstance(eos_token_id, int) else eos_token_id
    tokenizer = lm.tokenizer
    plain: Callable[[int], Hashable] = int if tokenizer is None else lambda t: tokenizer.decode([t]).strip().lower()
    growing = [Growing(rule, prompt[-1], frozenset(map(int, ends)), reads or plain) for prompt in forks.prompts]
    searches, read = [g.run() for g in growing], _Rows(forks, rule.k)
    why, wanted = [""] * len(forks), dict[int, Path]()

    def go_on(p: int, known: dict[Path, Following], sent: Following | None = None, first: bool = False) -> None:
        """Continues the search of prompt `p` until it needs a distribution that is not in `known`."""
        try:
            path = next(searches[p]) if first else searches[p].send(sent)
            while path in known:
                path = searches[p].send(known.pop(path))
            wanted[p] = path
        except StopIteration as end:
            why[p] = end.value

    for p in range(len(forks)):
        go_on(p, {}, first=True)
    while wanted:
        asked, found = dict(wanted), read(wanted)
        wanted.clear()
        for p, path in asked.items():
            go_on(p, found[p], found[p].pop(path, None))
    out = []
    for p, g in enumerate(growing):
        ids = [list(g.nodes[u].path[1:]) for u in g.done]
        texts = ids if tokenizer is None else [tokenizer.continuation(forks.prompts[p], row) for row in ids]
        out.append(TextLattice(**g.arrays(), texts=texts, ids=ids, calls=g.calls, read=read.read[p], merges=g.merges,
                               log_probs=np.array([g.nodes[u].total for u in g.done]), why=why[p]))
    return out
