"""Converts arguments to the objects that a call decodes with: model, cache, decoding method and stop strings."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from typing import Any

from decodax.algorithms.plain import Autoregressive
from decodax.common.arguments import shown
from decodax.common.registry import ALGORITHMS, CACHES, Configured, Entry
from decodax.core.algorithm import Algorithm, name_of
from decodax.core.cache import CacheConfig
from decodax.core.checks import hashable
from decodax.core.stops import StopTable
from decodax.core.target import for_target
from decodax.io.load import LM, find, load
from decodax.io.text import Tokenizer


def model(lm: Any) -> LM:
    """Returns the model: a result of `load`, or an argument of `load`, which is loaded once and kept.

    Raises:
        TypeError: `lm` is neither.
    """
    if isinstance(lm, (str, os.PathLike)):
        return _loaded(str(find(os.fspath(lm)).resolve()))
    if not isinstance(lm, LM):
        raise TypeError(f"lm: got {shown(lm)}, takes what decodax.load gives, or a model's name, directory or GGUF "
                        "file")
    return lm


def text_model(lm: Any, does: str) -> LM:
    """Returns `model(lm)` and checks that it has a tokenizer. `does` says in the error why it is needed.

    Raises:
        ValueError: the model has no tokenizer.
        TypeError: as in `model`.
    """
    lm = model(lm)
    if lm.tokenizer is None:
        raise ValueError(f"lm: has no tokenizer, and {does}; takes a model that has one")
    return lm


@functools.lru_cache(maxsize=2)
def _loaded(path: str) -> LM:
    return load(path)


def with_cache(lm: LM, cache: Any) -> LM:
    """Returns the model with another cache, given as an object or a string.

    Raises:
        ValueError: an unknown cache or option, or the model has a cache of its own kind.
        TypeError: `cache` is not a cache config, or is not hashable.
    """
    kind = CACHES.object(cache, lm)
    if not isinstance(kind, CacheConfig) and not _is_kind(kind):
        raise TypeError(f"cache: got {shown(cache)}, takes the name of a policy, such as 'snapkv:budget=512', a "
                        "function of decodax.caches, or a kind of cache of your own (decodax.core.cache.CacheConfig)")
    hashable("cache", kind)
    network, params = kind.wrap_model(lm) if isinstance(kind, CacheConfig) else (lm.model.with_cache(kind), lm.params)
    return dataclasses.replace(lm, model=network, params=params)


def _is_kind(given: Any) -> bool:
    """True if `given` can be called as a `decodax.core.types.CacheKind`."""
    if isinstance(given, type) or not callable(given):
        return False
    try:
        inspect.signature(given).bind([], 1, 1, None, None)
    except TypeError:
        return False
    except ValueError:      # of some functions written in C nobody knows it
        pass
    return True


@functools.lru_cache(maxsize=8)        # 0.1 s for a large vocabulary, and a stream of requests has few
def stop_table(tokenizer: Tokenizer, skip_special_tokens: bool, strings: tuple[str, ...], size: int) -> StopTable:
    """Returns the automaton that finds stop strings in a text token by token.

    Args:
        tokenizer: the tokenizer.
        skip_special_tokens: True if the texts do not contain special tokens.
        strings: the stop strings.
        size: number of tokens of the vocabulary.
    """
    pieces = tokenizer.pieces(skip_special_tokens)
    return StopTable.build(pieces.rest, strings, size, first=pieces.first, hidden=pieces.skipped)


def method_on(lm: LM, cache: Any, algorithm: Any, rows: int, draft: Any = None) -> tuple[LM, Algorithm]:
    """Returns the model with a cache, and the decoding method.

    Args:
        lm: the model.
        cache: as for `with_cache`; None leaves the model's own.
        algorithm: as `given` of `chosen`.
        rows: number of rows of the batch.
        draft: as for `chosen`.

    Raises:
        TypeError, ValueError: as `with_cache` and `chosen`; or a cache was given for a method that keeps none.
    """
    lm = lm if cache is None else with_cache(lm, cache)
    method = chosen(lm, algorithm, rows, draft)
    if cache is not None and not method.traits.caches:
        raise ValueError(f"cache: got {shown(cache)} with {name_of(method)}, which keeps none; takes None, or an "
                         "algorithm that has one")
    return lm, method


def chosen(lm: LM, given: Any, rows: int, draft: Any = None) -> Algorithm:
    """Returns the decoding method, given as an object or a string, or the default of the model, with what it needs of
    the model's network (`for_target`).

    Args:
        lm: the model, with its cache.
        given: the object, the string, or None.
        rows: number of rows of the batch, for methods that are tuned to it.
        draft: draft model, for methods given by a string.

    Raises:
        TypeError, ValueError: it is not a decoding method, or does not fit the model.
    """
    if isinstance(given, str):
        given = ALGORITHMS.read(given, draft)
    elif draft is not None and not isinstance(given, Configured):
        raise ValueError("draft: takes a method that misses a draft model beside it, such as "
                         f"algorithm='speculative-decoding'; got {shown(given)}")
    if isinstance(given, Configured) and given.entry.shelf == ALGORITHMS.kind:
        method = _built(given, lm, draft, rows)
    elif given is None:
        method = _default(lm)
    elif isinstance(given, type):
        raise TypeError(f"algorithm: got the class {given.__name__}, takes an instance of one")
    elif not isinstance(given, Algorithm):
        raise TypeError(f"algorithm: got {shown(given)}, takes a decoding method, such as decodax.Speculative(...), or "
                        "the name of a system, such as 'prompt-lookup:length=5'")
    else:
        method = given
    hashable("algorithm", method.bare())
    canvas, what = method.traits.canvas and not _continues(method), type(method).__name__
    if canvas and lm.diffusion is None:
        raise ValueError(f"algorithm: got {what}, a sampler of masked diffusion, for {lm.name!r}, which is "
                         "autoregressive; takes a sampler of autoregressive models. A model of your own that fills "
                         "masks says so by LM(diffusion=...)")
    # after a causal prefix such a model writes like any other, if its logits predict the next token
    if not canvas and lm.diffusion is not None and not (lm.diffusion.attention in ("causal-prefix", "causal")
                                                        and lm.diffusion.shift):
        raise ValueError(f"algorithm: got {what} for {lm.name!r}, which fills masks and sees both sides of them; takes "
                         "a sampler of masked diffusion, such as decodax.algorithms.llada()")
    return for_target(method, lm)


def _default(lm: LM) -> Algorithm:
    """Returns the method of a model if none is given."""
    if (d := lm.diffusion) is None:
        return Autoregressive()
    # the other methods are imported when a model needs one, so that plain decoding does not wait for them
    from decodax.algorithms.diffusion.samplers.assd import assd
    from decodax.algorithms.diffusion.samplers.diffusion_gemma import diffusion_gemma
    from decodax.algorithms.diffusion.samplers.llada import llada
    return assd(lm) if d.attention == "any-subset" else diffusion_gemma(lm) if d.mask is None else llada(lm)


def _continues(method: Algorithm) -> bool:
    """Returns True for a method on a canvas that continues texts with an ordinary causal model."""
    from decodax.algorithms.diffusion.adapter import FillsCanvas
    return isinstance(method, FillsCanvas) and method.adapter.autoregressive


class _Same:
    """A model compared by identity, as a key of a cache of algorithms that were made for it."""

    def __init__(self, lm: Any):
        self.lm = lm

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.lm is self.lm

    def __hash__(self) -> int:
        return id(self.lm)


def _built(given: Configured, lm: LM, draft: Any, rows: int) -> Algorithm:
    """Returns the algorithm of an entry with options. It is cached for the same models and options, since some
    algorithms run measurements when they are made."""
    draft = given.draft if draft is None else draft
    if isinstance(draft, (str, os.PathLike)):
        from decodax.io.drafters import holds_drafter, load_drafter
        if given.entry.takes_drafter or holds_drafter(draft):
            draft = load_drafter(draft, lm)
        else:
            draft = model(draft)
    if draft is not None and not given.entry.may_draft:
        raise ValueError(f"draft: got {shown(draft)}, and {given.entry.name!r} takes no draft model")
    if draft is None and given.entry.takes_draft:
        raise ValueError(f"draft: {given.entry.name!r} needs a draft model: generate(draft=decodax.load(...))")
    options = tuple(given.options.items())
    try:
        hash((given.entry, options))
    except TypeError:       # an option that is a list or an array
        make = _made.__wrapped__
    else:
        make = _made
    try:
        return make(given.entry, options, _Same(lm), _Same(draft), rows)
    except (ValueError, TypeError) as error:
        raise ValueError(f"algorithm: {error}") from error


# the entry is part of the key: a user may register another one under its name
@functools.lru_cache(maxsize=2)
def _made(entry: Entry, options: tuple[tuple[str, Any], ...], lm: _Same, draft: _Same, rows: int) -> Algorithm:
    return Configured(entry, dict(options)).build(lm.lm, draft.lm, batch=rows)
