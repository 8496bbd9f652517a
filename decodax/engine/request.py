"""Requests: every front end converts its arguments to a `Request`, and a `Job` runs one.

All values that may differ between prompts are fields of one object, so that they are checked in one place and selected
in one place, `select`.
"""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Self

import jax
import numpy as np

from decodax.cache.prefix import Prefix
from decodax.common.arguments import flag, is_whole, outside, positive, shown, whole, whole_rows, wrong
from decodax.common.struct import short
from decodax.constraints import languages as constraints
from decodax.core.algorithm import Algorithm, answering, check_policy, name_of, prefill_observer, refuse
from decodax.core.fitting import fit_cache, read_beyond
from decodax.core.memory import afford, bucket, check_context, power
from decodax.core.stops import stop_strings
from decodax.engine import searches
from decodax.engine.config import Config
from decodax.engine.lengths import (
    after_contexts,
    check_reach,
    check_room,
    contexts_of,
    new_tokens,
    prefixes_of,
)
from decodax.engine.methods import method_on, model, stop_table
from decodax.engine.names import check_names
from decodax.engine.policy import (
    adapter_inputs,
    closing,
    constrained,
    evenly_spaced,
    guidance_of,
    policy_of,
    row_inputs,
    text_inputs,
)
from decodax.io.load import LM
from decodax.io.prompts import prompt_rows, read_prompt
from decodax.models.inputs import PaddedInputs
from decodax.sampling import Policy
from decodax.sampling.arithmetic import evenly
from decodax.sampling.config import UNEXPRESSED, nothing
from decodax.sampling.neutral import is_neutral

CHUNK = 256
"""Number of prompt tokens in a prefill round."""



@dataclasses.dataclass(frozen=True, eq=False)
class Request:
    """A checked request for `B` prompts of `samples` rows each; the rows of a prompt are adjacent.

    Attributes:
        lm: the model.
        algorithm: the decoding method.
        prompts: token ids of each prompt.
        context: `i32[B]`, number of first tokens of each prompt that are its context, after which the cache is finished
            (see `decodax.generate`); or None.
        prefixes: keys and values of the contexts, if they are given; or None.
        behind: token ids after each prompt in the buffer, for canvases that attend to them; or None.
        max_new: `i32[B]`, maximum number of new tokens.
        min_new: `i32[B]`, minimum number of new tokens.
        seeds: `u32[B, 2]`, high and low word of each seed.
        request_ids: `u32[B]`.
        inputs: further inputs of the model for each prompt, a pytree of arrays `[B, ...]`, or None.
        guidance: `f32[B]`, guidance scales, or None.
        negative: token ids of each negative prompt, or None.
        policy: the policy of all rows, `[B * samples, ...]`, on the host.
        samples: number of rows of a prompt.
        stop: stop strings.
        logprobs: number of most likely tokens to record, or None for no log-probabilities.
        chunk: number of prompt tokens in a prefill round.
        batch_size: number of prompts that run at once, or None: all.
        max_time: time limit in seconds, or None.
        skip_special_tokens: True leaves special tokens out of texts.
        include_stop: True ends texts with the stop string instead of before it.
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
             inputs: Any = None, cache: Any = None, context: Any = None, adapter: Any = None, draft: Any = None,
             constraint: Any = None, named: Mapping[str, Any] | None = None, **sampling: Any) -> Self:
        """Checks the arguments of `decodax.generate`, or of another front end, and returns the request.

        Args:
            lm: the model, or its name.
            prompts: the prompts.
            where: name of the front end, for errors; those except `generate` and `infill` take one prompt.
            behind: token ids after each prompt; `prompts` are token ids then.
            named: options by the names of generation configs and of lines of jobs (`names.by_name`).

        Raises:
            ValueError, TypeError: an argument is out of its range, of the wrong kind, or does not fit the model; the
                message names it.
            OutOfTime: `max_time` was over before the constraints were built.
        """
        begun, lm = time.monotonic(), model(lm)
        inputs = text_inputs(lm, inputs)
        check_names(where, sampling)
        said, named = Config(lm), named or {}
        seconds = said.or_given("max_time", max_time, positive)
        sampling, num_samples = _returns(where, dict(sampling), num_samples)
        lm = searches.read_dola(lm, named.get("dola_layers"), said.or_given)
        search = None if algorithm is not None else searches.read(lm, {**named, **sampling}, said.or_given)
        algorithm = _searching(search, algorithm, named, sampling)
        evenness = sampling.pop("arithmetic_sampling", None)
        even = evenness is not None and flag("arithmetic_sampling", evenness)
        by_names = constraints.from_names(named)
        if by_names is not None and constraint is not None:
            raise ValueError("constraint: got one beside the name of another; takes one of them")
        held = by_names if constraint is None else constraint
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
            prefixes = prefixes_of(lm, context, count)
            before = contexts_of(lm, context, count) if prefixes is None else [list(p.tokens) for p in prefixes]
            ids = after_contexts(lm, before, ids, given)
            settle = np.array([len(row) for row in before], np.int32)
        if where not in ("generate", "infill") and count != 1:
            raise ValueError(f"{where}: takes one prompt, got {count}")
        wanted = None if where != "generate" else said.or_given(
            "num_return_sequences", num_samples, lambda name, x: whole(name, x, 1), None, "num_samples")
        if batch_size is not None:
            batch_size = min(whole("batch_size", batch_size, 1), count)
        lm, method = method_on(lm, cache, algorithm, (batch_size or count) * (wanted or 1), draft)
        if method.traits.samples is not None and wanted is not None:
            method = answering(method, wanted)
        samples = _samples(method, wanted, where)
        at_once = (batch_size or count) * samples
        lengths = np.array([len(row) for row in ids], np.int64)
        budget, counted = new_tokens(lengths, max_new_tokens, max_length, said)
        behind_settled = 0 if settle is None else int((lengths - settle).max())
        if (fitted := fit_cache(lm.model, power(int(np.max(budget)) + behind_settled))) is not lm.model:
            lm = dataclasses.replace(lm, model=fitted)
        afford(method, lm.model, lm.mesh, at_once, int((lengths + budget).max()), counted)
        if prefixes is not None:
            check_context(method, lm.model)
        check_reach(lm, lengths, budget, counted)
        if (more := read_beyond(method.wrap_model(lm.model), int(lengths.max()))):
            check_room(lm, int(lengths.max()) + more, "cache", "prompt and what the policy reads after it")

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
        if strings:
            refuse(method, "stop")
        if settle is not None and (inputs is not None or adapter is not None or guidance_scale is not None
                                   or behind is not None or not method.traits.prefills
                                   or prefill_observer(method) is not None):
            raise ValueError(f"context: {name_of(method)} learns from whole prompts, or there are inputs or a "
                             "guidance_scale; takes a method that reads the cache alone, without those")
        guidance, negative = guidance_of(lm, method, budget, guidance_scale, negative_prompts, said, inputs,
                                         bucket(int((lengths + budget).max())))
        skip = flag("skip_special_tokens", skip_special_tokens)
        policy = policy_of(lm, samples, np.repeat(lengths + budget, samples), np.repeat(least, samples), sampling, said,
                         searches.is_beam_search(search))
        late: TimeoutError | None = None
        if (asked := constraints.read(held, count)) is not None:
            try:
                policy = constrained(asked, lm, method, policy, lengths + budget, budget, least, samples,
                                      behind is not None, math.inf if seconds is None else begun + seconds)
            except TimeoutError as error:
                late = error
        words = np.array([divmod(s, 1 << 32) for s in seeds], np.uint32)
        if even:
            policy = evenly_spaced(method, policy, evenly(words, np.array(addresses, np.uint32), samples))
        if strings:
            assert lm.tokenizer is not None
            policy = policy.replace(stops=stop_table(lm.tokenizer, skip, tuple(strings), lm.vocab_size))
        policy = closing(policy)
        check_policy(method, policy)
        found = cls(lm=lm, algorithm=method, prompts=ids, context=settle, prefixes=prefixes, behind=behind,
                    max_new=budget.astype(np.int32),
                    min_new=np.array(least, np.int32), seeds=words,
                    request_ids=np.array(addresses, np.uint32),
                    inputs=row_inputs(adapter_inputs(lm, adapter, inputs, count), count),
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
        """Maximum number of tokens that a row commits after its cache has finished its prefill phase: its new tokens,
        and the tokens of its prompt after the context, if there is one."""
        asked = 0 if self.context is None else max(len(row) - n for row, n in
                                                   zip(self.prompts, self.context.tolist(), strict=True))
        return int(self.max_new.max()) + asked

    @property
    def longest(self) -> int:
        """Maximum number of tokens of a row, prompt and new tokens together."""
        return max(len(row) + int(new) for row, new in zip(self.prompts, self.max_new, strict=True))

    @property
    def widths(self) -> np.ndarray:
        """`i64[B]`, the width that the inputs of each prompt need if they are padded; else 0."""
        return self.inputs.widths if isinstance(self.inputs, PaddedInputs) else np.zeros(len(self), np.int64)

    @property
    def answers(self) -> int:
        """Number of rows of each prompt that are returned as results: `samples`, or fewer for methods that work on
        several rows of a prompt (`Traits.answers`)."""
        return self.algorithm.traits.answers or self.samples

    @property
    def firsts(self) -> Policy:
        """The sampling policy with one row for each prompt: that of the prompt's first row."""
        rows: Any = np.arange(len(self)) * self.samples
        return self.policy if self.samples == 1 else self.policy.select(rows)

    def fill(self, count: int) -> Request:
        """Pads the request to `count` prompts, with copies of the last one that have no new tokens."""
        if (more := count - len(self)) == 0:
            return self
        full = self.select([*range(len(self)), *[len(self) - 1] * more])
        return dataclasses.replace(full, max_new=np.append(self.max_new, np.zeros(more, np.int32)))

    def select(self, prompts: Sequence[int]) -> Request:
        """Returns the request of some prompts, given by their indices, in this order."""
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

    def narrow(self, width: int | None = None) -> Request:
        """Returns the request with padded inputs cut to a width; None: the one that they need."""
        if not isinstance(self.inputs, PaddedInputs):
            return self
        return dataclasses.replace(self, inputs=self.inputs.cut(int(self.widths.max()) if width is None else width))

    @staticmethod
    def join(requests: Sequence[Request]) -> Request:
        """Joins several requests, which have to agree in all fields that are not lists or arrays over prompts."""
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
    """The time limit of a request was over before its constraints had been built.

    Attributes:
        request: the request without its constraints; it must not run.
    """

    def __init__(self, message: str, request: Request):
        super().__init__(message)
        self.request = request


def _returns(where: str, sampling: dict[str, Any], num_samples: Any) -> tuple[dict[str, Any], Any]:
    """Returns the sampling options without `num_return_sequences`, and the number of samples, of which it is another
    name."""
    returns = sampling.pop("num_return_sequences", None)
    if returns is not None:
        if num_samples is not None:
            raise ValueError("num_samples and num_return_sequences: got both, takes one of them")
        if where != "generate" and not is_neutral("num_return_sequences", returns):
            raise ValueError(f"num_return_sequences: got {shown(returns)}; for generate only, {where} gives one text")
        returns = whole("num_return_sequences", returns, 1)
    return sampling, num_samples if returns is None else returns


def _searching(search: Algorithm | None, algorithm: Any, named: Mapping[str, Any], sampling: dict[str, Any]) -> Any:
    """Returns the algorithm, and removes from `sampling` the options that beam search uses."""
    for name in searches.ARGUMENTS:
        if algorithm is not None and not is_neutral(name, named.get(name)):
            raise ValueError(f"{name}: got {shown(named[name])} beside an algorithm; takes one of them")
    sampling["dola_layers"] = None      # it has been read
    if search is None and algorithm is None and named.get("num_beams") is None:
        return None
    # what the model's generation config says of beams has been read, or another method or one beam takes its place
    sampling.update({name: nothing(name) for name in searches.ARGUMENTS if name in UNEXPRESSED})
    if search is None:
        return algorithm
    if not searches.is_beam_search(search):
        sampling["top_k"] = None            # it says how many candidates there are
    return search


def _samples(method: Algorithm, wanted: int | None, where: str) -> int:
    """Returns the number of rows of a prompt: `wanted`, or the number on which the method works together."""
    together = method.traits.samples
    if together is None:
        return wanted or 1
    if where != "generate":
        raise ValueError(f"algorithm: {name_of(method)} works on {together} rows a prompt, and {where} has one; use "
                         "generate")
    return together
