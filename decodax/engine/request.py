"""What a caller asks for, read once: every front end makes a `Request` of its arguments, and a `Job` runs one.

All that may differ from prompt to prompt lies here side by side, so there is one place where it is checked and one,
`select`, where it is cut.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np

from decodax.algorithms.beams import BeamSearch
from decodax.algorithms.beams import arguments as beams
from decodax.algorithms.contrastive.dola import asked as read_out
from decodax.caches.prefix.prefix import Prefix
from decodax.common.arguments import (
    MOST,
    flag,
    id_rows,
    is_whole,
    outside,
    per_row,
    positive,
    shown,
    unknown_argument,
    whole,
    whole_rows,
    wrong,
)
from decodax.common.struct import short
from decodax.constraints import front as constraints
from decodax.constraints.canvas import OnCanvas
from decodax.constraints.transform import Closing, Constrained
from decodax.core.memory import afford, power
from decodax.core.stops import stop_strings
from decodax.core.types import Algorithm
from decodax.engine.methods import chosen, model, stop_table, with_cache
from decodax.io.load import LM
from decodax.io.prompts import prompt_rows, read_prompt, read_prompts, spell
from decodax.models import AdapterRows
from decodax.sampling import Policy
from decodax.sampling.arithmetic import Arithmetic, evenly
from decodax.sampling.base import Temperature
from decodax.sampling.build import DEFAULTS, assemble
from decodax.sampling.config import UNEXPRESSED, blaming, merge, nothing
from decodax.sampling.neutral import asks_nothing, is_neutral

CHUNK = 256
"""Prompt tokens a prefill round."""

NEW = 64
"""New tokens where neither the call nor the model says how many."""


@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """A checked request. B prompts of `samples` rows each; rows of a prompt stand side by side.

    Attributes:
        lm, algorithm: with what.
        prompts: ids of each prompt. context: `i32[B]`, how many of them the cache settles behind (see
            `decodax.generate`), or None. prefixes: what holds their keys and values already, or None.
        behind: ids that stand behind them in the buffer, for canvases that read it.
        max_new, min_new: `i32[B]`. seeds: `u32[B, 2]`, high and low word. request_ids: `u32[B]`.
        inputs: what the model is given for each prompt beside its tokens, arrays `[B, ...]`, or None.
        guidance: `f32[B]` scales, or None. negative: ids of each negative prompt, or None.
        policy: of all rows, `[B * samples, ...]`, on the host.
        samples: rows of a prompt. stop: stop strings. logprobs: most likely tokens to record, or None.
        chunk: prompt tokens a prefill round. batch_size: prompts at once, or None: all. max_time: seconds, or None.
        skip_special_tokens, include_stop: of the texts.
    """

    __repr__ = short

    lm: LM
    algorithm: Algorithm
    prompts: list[list[int]]
    context: np.ndarray | None
    prefixes: list[Prefix] | None
    behind: list[list[int]] | None
    max_new: np.ndarray
    min_new: np.ndarray
    seeds: np.ndarray
    request_ids: np.ndarray
    inputs: Any
    guidance: np.ndarray | None
    negative: list[list[int]] | None
    policy: Policy
    samples: int
    stop: tuple[str, ...]
    logprobs: int | None
    chunk: int
    batch_size: int | None
    max_time: float | None
    skip_special_tokens: bool
    include_stop: bool

    @classmethod
    def read(cls, lm: Any, prompts: Any, where: str = "generate", behind: list[list[int]] | None = None, /, *,
             max_new_tokens: Any = None, max_length: Any = None, min_new_tokens: Any = None, algorithm: Any = None,
             seed: Any = 0, num_samples: Any = None, stop: Any = None, include_stop: Any = False, logprobs: Any = None,
             request_ids: Any = None, guidance_scale: Any = None, negative_prompts: Any = None,
             skip_special_tokens: Any = True, max_time: Any = None, chunk: Any = CHUNK, batch_size: Any = None,
             inputs: Any = None, cache: Any = None, context: Any = None, adapter: Any = None,
             **sampling: Any) -> Self:
        """Reads the arguments of `decodax.generate`, and of the front ends that share them.

        Args:
            where: the front end, for errors; those but `generate` and `infill` take one prompt.
            behind: ids behind each prompt; the prompts are ids then.

        Raises:
            ValueError, TypeError: by name what is out of its range, of the wrong kind, or does not fit the model.
            OutOfTime: `max_time` was out before the constraints were built.
        """
        begun, lm = time.monotonic(), model(lm)
        check_names(where, sampling)
        said = _Config(lm)
        seconds = said.or_given("max_time", max_time, positive)
        sampling, num_samples = _returns(where, dict(sampling), num_samples)
        lm = read_out(lm, sampling.pop("dola_layers", None), said.or_given)
        search = None if algorithm is not None else beams.read(lm, sampling, said.or_given)
        algorithm = _searching(search, algorithm, sampling)
        evenness = sampling.pop("arithmetic_sampling", None)
        even = evenness is not None and flag("arithmetic_sampling", evenness)
        held = {name: sampling.pop(name, None) for name in constraints.ARGUMENTS}
        if not all(map(is_whole, lm.eos)):
            raise ValueError(f"{said.origin}: eos_token_id: got {shown(lm.generation_config.get('eos_token_id'))}, "
                             "takes a token id or a list of them")
        if not (is_whole(lm.pad) and 0 <= lm.pad < lm.vocab_size):
            raise ValueError(f"{said.origin} (generation_config.json or config.json): pad_token_id: got "
                             f"{shown(lm.pad)}, takes a token id below the vocabulary's size, {lm.vocab_size}")
        given = prompt_rows(prompts) if behind is None else [(row, "prompts") for row in prompts]
        ids = [read_prompt(lm, row, name) for row, name in given] if behind is None else prompts
        count = len(ids)
        settle = prefixes = None
        if context is not None:
            prefixes = _prefixes(lm, context, count)
            before = _contexts(lm, context, count) if prefixes is None else [list(p.tokens) for p in prefixes]
            ids = _after(lm, before, ids, given)
            settle = np.array([len(row) for row in before], np.int32)
        if where not in ("generate", "infill") and count != 1:
            raise ValueError(f"{where}: takes one prompt, got {count}")
        wanted = None if where != "generate" else said.or_given(
            "num_return_sequences", num_samples, lambda name, x: whole(name, x, 1), None, "num_samples")
        if batch_size is not None:
            batch_size = min(whole("batch_size", batch_size, 1), count)
        if cache is not None:
            lm = with_cache(lm, cache)
        method = chosen(lm, algorithm, (batch_size or count) * (wanted or 1))
        if method.samples is not None and wanted is not None:
            method = method.answering(wanted)
        samples = _samples(method, wanted, where)
        at_once = (batch_size or count) * samples
        lengths = np.array([len(row) for row in ids], np.int64)
        budget, counted = _budget(lengths, max_new_tokens, max_length, said)
        behind_settled = 0 if settle is None else int((lengths - settle).max())
        if (fitted := lm.model.fit(power(int(np.max(budget)) + behind_settled))) is not lm.model:
            lm = dataclasses.replace(lm, model=fitted)
        afford(method, lm.model, lm.mesh, at_once, int((lengths + budget).max()), counted)
        _reach(lm, lengths, budget, counted)
        if (more := method.through(lm.model).beyond(int(lengths.max()))):
            _room(lm, int(lengths.max()) + more, "cache", "prompt and what the policy reads behind it")

        least = said.or_given("min_new_tokens", min_new_tokens, lambda name, x: whole_rows(name, x, count), [0] * count)
        for i, (few, most) in enumerate(zip(least, budget.tolist(), strict=True)):
            if 0 < most < few:
                warnings.warn(f"min_new_tokens: got {few} for prompt {i}, which has room for {most} new tokens; so no "
                              "end of sequence and no stop string counts", stacklevel=outside())
                break
        if seed is None:
            raise wrong("seed", seed, "a whole number from 0 to 2**64 - 1, or one for each prompt")
        seeds = whole_rows("seed", seed, count, high=2 ** 64 - 1)
        addresses = list(range(count)) if request_ids is None else \
            whole_rows("request_ids", request_ids, count, high=2 ** 32 - 1)
        strings = said.or_given("stop_strings", stop, lambda name, x: stop_strings(x), (), "stop")
        if strings and lm.tokenizer is None:
            raise ValueError("stop: stop strings need a tokenizer, and this model has none")
        if settle is not None and (inputs is not None or adapter is not None or guidance_scale is not None
                                   or behind is not None or not method.prefills or method.observer is not None):
            raise ValueError(f"context: {method.name} learns from whole prompts, or there are inputs or a "
                             "guidance_scale; takes a method that reads the cache alone, without those")
        guidance, negative = _guidance(lm, method, budget, guidance_scale, negative_prompts, said)
        skip = flag("skip_special_tokens", skip_special_tokens)
        policy = _policy(lm, samples, np.repeat(lengths + budget, samples), np.repeat(least, samples), sampling, said,
                         isinstance(search, BeamSearch))
        late: TimeoutError | None = None
        if (asked := constraints.read(held, count)) is not None:
            try:
                policy = _constrained(asked, lm, method, policy, lengths + budget, budget, least, samples,
                                      behind is not None, math.inf if seconds is None else begun + seconds)
            except TimeoutError as error:
                late = error
        words = np.array([divmod(s, 1 << 32) for s in seeds], np.uint32)
        if even:
            policy = _even(method, policy, evenly(words, np.array(addresses, np.uint32), samples))
        if strings:
            assert lm.tokenizer is not None
            policy = policy.replace(stops=stop_table(lm.tokenizer, skip, tuple(strings), lm.vocab_size))
        policy = _closing(policy)
        found = cls(lm=lm, algorithm=method, prompts=ids, context=settle, prefixes=prefixes, behind=behind,
                    max_new=budget.astype(np.int32),
                    min_new=np.array(least, np.int32), seeds=words,
                    request_ids=np.array(addresses, np.uint32),
                    inputs=_inputs(_adapters(lm, adapter, inputs, count), count),
                    guidance=guidance, negative=negative, policy=policy,
                    samples=samples, stop=strings, chunk=whole("chunk", chunk, 1), batch_size=batch_size,
                    logprobs=None if logprobs is None else whole("logprobs", logprobs, 0, lm.vocab_size),
                    max_time=seconds, skip_special_tokens=skip,
                    include_stop=flag("include_stop", include_stop))
        if late is not None:
            raise OutOfTime(str(late), found)
        return found

    def __len__(self) -> int:
        return len(self.prompts)

    @property
    def more(self) -> int:
        """The most tokens of a row that come when its cache has settled: new ones, and those behind the context."""
        asked = 0 if self.context is None else max(len(row) - n for row, n in
                                                   zip(self.prompts, self.context.tolist(), strict=True))
        return int(self.max_new.max()) + asked

    @property
    def longest(self) -> int:
        """Tokens of the longest row, prompt and new ones."""
        return max(len(row) + int(new) for row, new in zip(self.prompts, self.max_new, strict=True))

    @property
    def answers(self) -> int:
        """Rows of the result that a prompt has."""
        return self.algorithm.answers or self.samples

    @property
    def firsts(self) -> Policy:
        """The policy of each prompt's first row."""
        rows: Any = np.arange(len(self)) * self.samples
        return self.policy if self.samples == 1 else self.policy.select(rows)

    def fill(self, count: int) -> Request:
        """The request of `count` prompts: these, and the last one over and over with nothing to make."""
        if (more := count - len(self)) == 0:
            return self
        full = self.select([*range(len(self)), *[len(self) - 1] * more])
        return dataclasses.replace(full, max_new=np.append(self.max_new, np.zeros(more, np.int32)))

    def select(self, prompts: Sequence[int]) -> Request:
        """The request of these prompts alone, in this order."""
        index: Any = np.asarray(prompts)
        some = lambda values: None if values is None else [values[i] for i in index]
        each = (index[:, None] * self.samples + np.arange(self.samples)).reshape(-1)
        return dataclasses.replace(
            self, prompts=[self.prompts[i] for i in index], behind=some(self.behind), negative=some(self.negative),
            context=None if self.context is None else self.context[index], prefixes=some(self.prefixes),
            max_new=self.max_new[index], min_new=self.min_new[index], seeds=self.seeds[index],
            request_ids=self.request_ids[index], inputs=jax.tree.map(lambda x: x[index], self.inputs),
            guidance=None if self.guidance is None else self.guidance[index],
            policy=self.policy.select(each))

    @staticmethod
    def join(requests: Sequence[Request]) -> Request:
        """The request of all prompts of several, which agree in everything that is not said of each prompt."""
        if len(requests) == 1:
            return requests[0]
        first = requests[0]
        lists: Any = lambda pick: None if pick(first) is None else [x for request in requests for x in pick(request)]
        arrays = lambda pick: jax.tree.map(lambda *xs: np.concatenate(xs), *map(pick, requests))
        policy = arrays(lambda r: r.policy.own).sharing(first.policy)
        return dataclasses.replace(
            first, prompts=lists(lambda r: r.prompts), context=arrays(lambda r: r.context),
            prefixes=lists(lambda r: r.prefixes),
            behind=lists(lambda r: r.behind), max_new=arrays(lambda r: r.max_new), min_new=arrays(lambda r: r.min_new),
            seeds=arrays(lambda r: r.seeds), request_ids=arrays(lambda r: r.request_ids),
            inputs=arrays(lambda r: r.inputs), guidance=arrays(lambda r: r.guidance),
            negative=lists(lambda r: r.negative), policy=policy)


class OutOfTime(TimeoutError):
    """The time of a request was out before its constraints had been built.

    Attributes:
        request: without its constraints, so it must not run.
    """

    def __init__(self, message: str, request: Request):
        super().__init__(message)
        self.request = request


def _prefixes(lm: LM, context: Any, count: int) -> list[Prefix] | None:
    """What holds the keys and values of the context of each prompt, or None where texts were given."""
    rows = [context] if isinstance(context, Prefix) else context if isinstance(context, list | tuple) else []
    if not any(isinstance(row, Prefix) for row in rows):
        return None
    if not all(isinstance(row, Prefix) for row in rows) or len(rows) not in (1, count):
        raise ValueError(f"context: got {len(rows)} for {count} prompts, takes one prefix, or one for each; or texts")
    for row in rows:
        row.check(lm.model)
    return list(rows) * (count // len(rows))


def _after(lm: LM, before: list[list[int]], ids: list[list[int]], given: list[tuple[Any, str]]) -> list[list[int]]:
    """The ids of contexts with those of the prompts, of which texts go on from them."""
    # a tokenizer that begins chats with a token of its own has begun the context with it
    again = lambda a, b: b[0] == lm.bos == a[0] and len(b) > 1
    return [a + (spell(lm, row, name, after=a) if isinstance(row, str) and row else b[1:] if again(a, b) else b)
            for a, b, (row, name) in zip(before, ids, given, strict=True)]


def _contexts(lm: LM, context: Any, count: int) -> list[list[int]]:
    """The ids of the context of each prompt."""
    rows = read_prompts(lm, context, "context")
    if len(rows) not in (1, count):
        raise ValueError(f"context: got {len(rows)} for {count} prompts, takes one, or one for each")
    return rows * (count // len(rows))


ELSEWHERE = {
    "batch": "batch_size= splits prompts into batches", "vocab_size": "it is the model's own",
    "stops": "stop= takes the strings",
    "n": "it is num_samples= here", "max_tokens": "it is max_new_tokens= here", "stop_strings": "it is stop= here",
    "stop_token_ids": "it is eos_token_id= here", "streamer": "decodax.stream gives pieces of text as they come",
    "assistant_model": "algorithm=decodax.algorithms.make('seed-exact', draft=decodax.load(...)) drafts with a model",
    "prompt_lookup_num_tokens": "algorithm='prompt-lookup:length=10' drafts from the text",
    "logits_processor": "transforms= takes decodax.sampling.Transform objects",
    "stopping_criteria": "stop=, eos_token_id=, max_time= and max_new_tokens= end a text",
    "generation_config": "give its entries as arguments", "attention_mask": "give prompts with input_ids and "
    "attention_mask", "input_ids": "prompts take ids", "pad_token_id":
    "the model's own fills the tokens of shorter rows", "return_dict_in_generate": "a Result has all there is",
    "output_scores": "logprobs= records log-probabilities"}
"""Arguments that callers know from elsewhere, or from below, and what there is here."""


FRONT = [p.name for p in inspect.signature(Request.read).parameters.values() if p.kind is p.KEYWORD_ONLY]
FRONT += ["progress", "every", "ends"]
"""Arguments of front ends, which no policy is made of."""

ONE_ROW = ("num_samples", "num_return_sequences", "batch_size", "progress")
WITHOUT = {"generate": ("every", "ends"), "stream": (*ONE_ROW, "every", "ends"), "watch": (*ONE_ROW, "ends"),
           "infill": ("max_new_tokens", "max_length", "min_new_tokens", "num_samples", "num_return_sequences", "stop",
                      "include_stop", "negative_prompts", "inputs", "cache", "context", "adapter", "progress", "every")}
"""Which of them a front end does not take."""


OTHERS = ("num_return_sequences", "dola_layers", "arithmetic_sampling", *beams.ARGUMENTS, *constraints.ARGUMENTS)
"""Arguments that say neither a policy nor how it is run."""


def check_names(where: str, sampling: Mapping[str, Any]) -> None:
    """Checks the names of sampling arguments.

    Raises:
        TypeError: one is none, or one of another front end; says what may have been meant.
    """
    for name in sampling:
        if name in ELSEWHERE:
            raise TypeError(f"{name}: unknown argument; {ELSEWHERE[name]}")
        if name in FRONT:
            raise TypeError(f"{name}: {where} takes no such argument")
        if name not in DEFAULTS and name not in UNEXPRESSED and name not in OTHERS:
            raise unknown_argument(name, where, takes(where))


def takes(where: str) -> set[str]:
    """Names of the arguments that a front end takes."""
    return {*FRONT, *DEFAULTS, *OTHERS} - {*WITHOUT[where], *ELSEWHERE, "eos"}


def without(where: str, given: Mapping[str, Any], refused: Mapping[str, str]) -> dict[str, Any]:
    """Arguments without those that a front end does not take and that ask for nothing.

    Args:
        refused: what there is in place of each that it does not take.

    Raises:
        TypeError: one of them asks for something.
    """
    for name, why in refused.items():
        if not asks_nothing(name, given.get(name)):
            raise TypeError(f"{name}: {where} takes no such argument; {why}")
    return {name: value for name, value in given.items() if name not in refused}


class _Config:
    """What the model's generation config says."""

    def __init__(self, lm: LM):
        self.entries, self.origin = dict(lm.generation_config or {}), f"generation config of {lm.name!r}"

    def or_given(self, key: str, given: Any, read: Callable[[str, Any], Any], default: Any = None,
                 name: str | None = None) -> Any:
        """The argument `name` (default `key`) as `read` reads it, or, where it is None, the config's entry `key`."""
        if given is not None:
            return read(name or key, given)
        found = self.entries.get(key)
        if found is None:
            return default
        with blaming(self.origin, (key, name or key)):
            return read(key, found)


def _budget(lengths: np.ndarray, max_new: Any, max_length: Any, said: _Config) -> tuple[np.ndarray, str]:
    """New tokens of each prompt, `i64[B]`, and which argument says so."""
    if max_new is not None and max_length is not None:
        raise ValueError("max_length and max_new_tokens: got both, takes one of them")
    if max_length is not None:
        return _within(lengths, "max_length", max_length), "max_length"
    if max_new is not None:
        new = np.array(whole_rows("max_new_tokens", max_new, len(lengths), default=-1), np.int64)
        return (np.where(new < 0, _budget(lengths, None, None, said)[0], new) if (new < 0).any() else new,
                "max_new_tokens")
    own = said.or_given("max_new_tokens", None, whole)
    if own is None and said.entries.get("max_length") is not None:
        return said.or_given("max_length", None, lambda name, x: _within(lengths, name, whole(name, x))), "max_length"
    return np.full(len(lengths), NEW if own is None else own), "max_new_tokens"


def _within(lengths: np.ndarray, name: str, limit: Any) -> np.ndarray:
    """What a length with the prompt leaves for new tokens."""
    total = np.array(whole_rows(name, limit, len(lengths), 1, default=-1), np.int64)
    total = np.where(total < 0, lengths + NEW, total)
    if (short := np.flatnonzero(total < lengths)).size:
        raise ValueError(f"{name}: got {total[short[0]]} for a prompt of {lengths[short[0]]} tokens; it counts the "
                         "prompt, max_new_tokens does not")
    return total - lengths


def _room(lm: LM, longest: int, name: str, what: str = "prompt and new tokens", hint: str = "") -> None:
    """Checks a length against the model's positions, and warns beyond the length that it was made for; `hint` ends the
    warning."""
    limit = lm.model.max_positions
    if limit is not None and longest > limit:
        raise ValueError(f"{name}: {what} are {longest}, the model has {limit} positions")
    trained = lm.model.trained_positions
    if trained is not None and longest > trained:
        warnings.warn(f"{name}: {what} are {longest}, the model was made for {trained}{hint}", stacklevel=outside())


def _reach(lm: LM, lengths: np.ndarray, budget: np.ndarray, name: str) -> None:
    """Checks prompts, and what is to follow them, as `_room` does; a prompt that is too long by itself is named.

    Args:
        name: the argument that says how many tokens follow.
    """
    totals: Any = lengths + budget
    row, most = int(lengths.argmax()), int(totals.argmax())
    bounds = [x for x in (lm.model.max_positions, lm.model.trained_positions) if x is not None]
    if bounds and lengths[row] > min(bounds):
        _room(lm, int(lengths[row]), f"prompts[{row}]", "the prompt's tokens")
    else:
        fit = min(bounds, default=0) - int(lengths[most])
        _room(lm, int(totals[most]), name, hint="; later tokens are seldom of use. There is room for "
              f"{fit} new tokens, and progress=True shows how far a long call is")


def _returns(where: str, sampling: dict[str, Any], num_samples: Any) -> tuple[dict[str, Any], Any]:
    """The arguments without `num_return_sequences`, which is transformers' name for `num_samples`."""
    returns = sampling.pop("num_return_sequences", None)
    if returns is not None:
        if num_samples is not None:
            raise ValueError("num_samples and num_return_sequences: got both, takes one of them")
        if where != "generate" and not is_neutral("num_return_sequences", returns):
            raise ValueError(f"num_return_sequences: got {shown(returns)}; for generate only, {where} gives one text")
        returns = whole("num_return_sequences", returns, 1)
    return sampling, num_samples if returns is None else returns


def _searching(search: Algorithm | None, algorithm: Any, sampling: dict[str, Any]) -> Any:
    """The method, and `sampling` without the arguments of beam search."""
    for name in beams.ARGUMENTS:
        if algorithm is not None and not is_neutral(name, sampling.get(name)):
            raise ValueError(f"{name}: got {shown(sampling[name])} beside an algorithm; takes one of them, such as "
                             "algorithm=decodax.algorithms.beams.BeamSearch(4)")
        if search is not None or name not in UNEXPRESSED:
            sampling.pop(name, None)
    sampling["dola_layers"] = None      # it has been read
    if search is None:
        return algorithm
    # what the model's generation config says of beams has been read
    sampling.update({name: nothing(name) for name in beams.ARGUMENTS if name in UNEXPRESSED})
    if not isinstance(search, BeamSearch):
        sampling["top_k"] = None            # it says how many candidates there are
    return search


def _even(method: Algorithm, policy: Policy, link: Arithmetic) -> Policy:
    """The policy whose samples have evenly spaced codes."""
    if method.canvas or method.samples is not None:
        raise ValueError(f"arithmetic_sampling: {method.name} draws its samples in a way of its own; takes a method "
                         "that draws them token by token")
    return policy.replace(transforms=(*policy.transforms, link))


def _constrained(asked: list[Any], lm: LM, method: Algorithm, policy: Policy, ends: np.ndarray, budget: np.ndarray,
                 least: Sequence[int], samples: int, given: bool, until: float) -> Policy:
    """The policy with constraints in front of its temperature.

    Args:
        least: new tokens that each prompt must have before an end counts. given: whether the canvas is part of the
            text already. until: when the time is out, by `time.monotonic`.
    """
    if given:
        budget = np.full_like(budget, MOST)
    chain, eos = list(policy.transforms), np.asarray(policy.eos)
    at = next(i for i, t in enumerate(chain) if isinstance(t, Temperature))
    if method.canvas and any(x is not None and x[0] == "grammar" and constraints.hosted(x[1]) for x in asked):
        raise ValueError(f"grammar: {method.name} fills positions in any order; takes a grammar whose rules do not "
                         "refer to themselves")
    if method.canvas and not given and not (eos >= 0).any(1).all():
        name = next(x[0] for x in asked if x is not None)
        raise ValueError(f"{name}: on a canvas takes a model with an end of sequence, behind which the text may stop")
    constraints.in_time(until, 0, len(asked))
    hosted = constraints.match(asked, lm.tokenizer, lm.vocab_size, eos, samples)
    if hosted is not None:
        chain.insert(at, hosted)
        asked = [None if x is not None and x[0] == "grammar" and constraints.hosted(x[1]) else x for x in asked]
        if all(x is None for x in asked):
            return policy.replace(transforms=tuple(chain))
    link, table = constraints.constrain(asked, lm.tokenizer, lm.vocab_size, eos, np.repeat(ends, samples), budget,
                                        samples, _masks(lm) if method.canvas else (), () if given else least, until)
    link = link.replace(place=len(policy.tables))
    chain.insert(at, OnCanvas(link.start, link.end, link.place, whole=given) if method.canvas else link)
    return policy.replace(transforms=tuple(chain), tables=(*policy.tables, table))


def _closing(policy: Policy) -> Policy:
    """The policy that ends rows whose text is complete, where they are held to a language and have no end of
    sequence."""
    link = next((t for t in policy.transforms if type(t) is Constrained), None)
    if link is None or (np.asarray(policy.eos) >= 0).any():
        return policy
    return policy.replace(stops=Closing.of(policy.stops, policy.tables[link.place]))


def _masks(lm: LM) -> tuple[int, ...]:
    """Tokens that stand for what is not decided."""
    mask = None if lm.diffusion is None else lm.diffusion.mask
    return () if mask is None else (int(mask),)


def _samples(method: Algorithm, wanted: int | None, where: str) -> int:
    """Rows of a prompt: as many as asked for, or as the method works on together."""
    together = method.samples
    if together is None:
        return wanted or 1
    if where != "generate":
        raise ValueError(f"algorithm: {method.name} works on {together} rows a prompt, and {where} has one; use "
                         "generate")
    return together


def _adapters(lm: LM, adapter: Any, inputs: Any, count: int) -> Any:
    """Inputs of the model, where rows have adapters."""
    if not lm.adapters:
        if not asks_nothing("adapter", adapter):
            raise ValueError(f"adapter: got {shown(adapter)}, and {lm.name!r} has none; takes None, or a model that "
                             "lm.with_adapters gave some")
        return inputs
    if inputs is not None:
        raise ValueError(f"inputs: {lm.name!r} has adapters, and takes no inputs beside them")
    names = [adapter] * count if adapter is None or isinstance(adapter, str) else adapter
    if not isinstance(names, (list, tuple)) or len(names) != count:
        raise ValueError(f"adapter: got {shown(adapter)} for {count} prompts, takes a name, or a name or None for each")
    if unknown := next((name for name in names if name is not None and name not in lm.adapters), None):
        raise ValueError(f"adapter: got {shown(unknown)}, takes {', '.join(lm.adapters)}")
    which: Any = np.array([0 if name is None else 1 + lm.adapters.index(name) for name in names], np.int32)
    return AdapterRows(which)


def _inputs(inputs: Any, count: int) -> Any:
    """Inputs of the model, on the host."""
    if isinstance(inputs, Iterator):
        raise wrong("inputs", inputs, f"a pytree of arrays [{count}, ...]")
    arrays = jax.tree.map(np.asarray, inputs)
    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
        if leaf.shape[:1] != (count,):
            raise ValueError(f"inputs{jax.tree_util.keystr(path)}: got shape {leaf.shape} for {count} prompts, takes "
                             f"[{count}, ...]")
    return arrays


def _guidance(lm: LM, method: Algorithm, budget: np.ndarray, scale: Any, negative: Any, said: _Config
              ) -> tuple[np.ndarray | None, list[list[int]] | None]:
    """Scales and negative prompts."""
    count = len(budget)
    scales = said.or_given("guidance_scale", scale, lambda name, x: per_row(name, x, count, np.float32, 1, "a number",
                                                                            np.isfinite))
    if scales is not None and (scales == 1).all():
        scales = None
    if negative is None:
        return scales, None
    if method.canvas:
        raise ValueError("negative_prompts: a canvas is guided against masks in the prompt's place, without them")
    if scales is None:
        raise ValueError("negative_prompts: got some without a guidance_scale other than 1")
    ids = read_prompts(lm, negative, "negative_prompts")
    if len(ids) not in (1, count):
        raise ValueError(f"negative_prompts: got {len(ids)} for {count} prompts")
    ids = ids * (count // len(ids))
    _room(lm, max(len(row) + int(new) for row, new in zip(ids, budget, strict=True)), "negative_prompts")
    return scales, ids


def _policy(lm: LM, samples: int, lengths: np.ndarray, least: np.ndarray, sampling: dict[str, Any],
            said: _Config, searching: bool) -> Policy:
    """The policy of all rows. Beams (`searching`) want a way on beside each end of a sequence."""
    config = dict(said.entries)
    for name in ("guidance_scale", "max_length", "max_new_tokens", "min_new_tokens"):
        config.pop(name, None)
    given = dict(sampling)
    if given.get("eos") is not None and given.get("eos_token_id") is not None:
        raise ValueError("eos and eos_token_id: got both, takes one of them")
    named = [name for name in ("eos", "eos_token_id") if name in given]
    values = [given.pop(name) for name in named]
    ends: Any = next((e for e in values if e is not None), []) if named else lm.eos
    with blaming(said.origin, () if named else ("eos_token_id",)):
        rows = id_rows("eos_token_id", ends, len(lengths), lm.vocab_size, samples)
        some = (rows >= 0).any()
    if searching:
        given.setdefault("min_tokens_to_keep", rows.shape[1] + 1)
    if not some:      # there is no end that a least length could forbid
        for source in (given, config):
            if source.get("min_length") is not None:
                per_row("min_length", source.pop("min_length"), len(lengths), np.int64, 0, "a whole number from 0 on",
                        lambda x: x >= 0, samples)
        least = np.zeros_like(least)
    config.pop("eos_token_id", None)
    settings = merge(config, said.origin, {"vocab_size": lm.vocab_size, "max_length": lengths, "min_new_tokens": least,
                                      "eos_token_id": ends, **given})
    with blaming(said.origin, config.keys() - given.keys()):
        return assemble(len(lengths), settings, samples)
