"""Builds the policy of a request: logit transforms, constraints, stop rules, guidance, and the inputs of its rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from decodax.common.arguments import MOST, id_rows, per_row, shown, wrong
from decodax.constraints import matching as constraints
from decodax.constraints.canvas import OnCanvas
from decodax.constraints.transform import Closing, Constrained
from decodax.core.algorithm import Algorithm, name_of, refuse
from decodax.engine.config import Config
from decodax.engine.lengths import check_room
from decodax.io.load import LM
from decodax.io.prompts import read_prompts
from decodax.models import AdapterRows
from decodax.models.inputs import EncoderText, ReadsText, read_texts
from decodax.sampling import Policy
from decodax.sampling.arithmetic import Arithmetic
from decodax.sampling.base import Temperature
from decodax.sampling.build import assemble
from decodax.sampling.config import blaming, merge
from decodax.sampling.guidance import check_guidance
from decodax.sampling.neutral import asks_nothing


def policy_of(lm: LM, samples: int, lengths: np.ndarray, least: np.ndarray, sampling: dict[str, Any],
            said: Config, searching: bool) -> Policy:
    """Returns the policy of all rows.

    With `searching` (beam search), truncations keep more tokens than there are end-of-sequence tokens, so that each
    beam can continue.
    """
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


def evenly_spaced(method: Algorithm, policy: Policy, link: Arithmetic) -> Policy:
    """Returns the policy with the transform `link` for arithmetic sampling added: the samples of a prompt are decoded
    from evenly spaced codes in [0, 1), so that they differ more than independent ones."""
    if method.traits.canvas or method.traits.samples is not None:
        raise ValueError(f"arithmetic_sampling: {name_of(method)} draws its samples in a way of its own; takes a "
                         "method that draws them token by token")
    return policy.replace(transforms=(*policy.transforms, link))


def constrained(asked: list[Any], lm: LM, method: Algorithm, policy: Policy, ends: np.ndarray, budget: np.ndarray,
                 least: Sequence[int], samples: int, given: bool, until: float) -> Policy:
    """Returns the policy with a transform that forbids the tokens which the constraints do not allow, placed before its
    temperature.

    Args:
        asked: for each prompt the key of its constraint, a tuple that begins with its kind, such as "grammar"; None:
            none.
        lm: the model.
        method: the decoding method.
        policy: the policy.
        ends: index after the last token that each prompt's text may have.
        budget: maximum number of new tokens of each prompt.
        least: minimum number of new tokens of each prompt before the text may end.
        samples: number of rows of a prompt.
        given: True if the canvas already contains a part of the text (infilling).
        until: time by `time.monotonic` at which building the constraints is given up.

    Raises:
        ValueError: a constraint that the method does not support.
    """
    if given:
        budget = np.full_like(budget, MOST)
    if any(x is not None for x in asked):
        refuse(method, "constraint")
    chain, eos = list(policy.transforms), np.asarray(policy.eos)
    at = next(i for i, t in enumerate(chain) if isinstance(t, Temperature))
    if method.traits.canvas and any(x is not None and x[0] == "grammar" and constraints.hosted(x[1]) for x in asked):
        raise ValueError(f"grammar: {name_of(method)} fills positions in any order; takes a grammar whose rules do not "
                         "refer to themselves")
    if method.traits.canvas and not given and not (eos >= 0).any(1).all():
        name = next(x[0] for x in asked if x is not None)
        raise ValueError(f"{name}: on a canvas takes a model with an end of sequence, after which the text may stop")
    constraints.in_time(until, 0, len(asked))
    hosted = constraints.match(asked, lm.tokenizer, lm.vocab_size, eos, samples)
    if hosted is not None:
        chain.insert(at, hosted)
        asked = [None if x is not None and x[0] == "grammar" and constraints.hosted(x[1]) else x for x in asked]
        if all(x is None for x in asked):
            return policy.replace(transforms=tuple(chain))
    link, table = constraints.constrain(asked, lm.tokenizer, lm.vocab_size, eos, np.repeat(ends, samples), budget,
                                        samples, _masks(lm) if method.traits.canvas else (), () if given else least,
                                        until)
    link = link.replace(place=len(policy.tables))
    chain.insert(at, OnCanvas(link.start, link.end, link.place, whole=given) if method.traits.canvas else link)
    return policy.replace(transforms=tuple(chain), tables=(*policy.tables, table))


def closing(policy: Policy) -> Policy:
    """Returns the policy; for constrained rows without an end-of-sequence token, adds the stop rule `Closing`, which
    ends rows whose text is complete."""
    link = next((t for t in policy.transforms if type(t) is Constrained), None)
    if link is None or (np.asarray(policy.eos) >= 0).any():
        return policy
    return policy.replace(stops=Closing.of(policy.stops, policy.tables[link.place]))


def _masks(lm: LM) -> tuple[int, ...]:
    """Returns the mask token of a diffusion model as a tuple, or ()."""
    mask = None if lm.diffusion is None else lm.diffusion.mask
    return () if mask is None else (int(mask),)


def adapter_inputs(lm: LM, adapter: Any, inputs: Any, count: int) -> Any:
    """Returns the inputs of the model that select the adapter of each row, or `inputs` for a model without adapters."""
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


def text_inputs(lm: LM, inputs: Any) -> Any:
    """Returns the inputs of the model, with a text or a list of texts as what its encoder reads."""
    texts = isinstance(inputs, str) or (isinstance(inputs, (list, tuple)) and len(inputs) > 0
                                        and all(isinstance(text, str) for text in inputs))
    found = read_texts(lm, inputs, None, "inputs") if texts else inputs
    if isinstance(found, EncoderText) and isinstance(lm.model, ReadsText):
        _check_source(found, lm.model.source_vocab or lm.vocab_size)
    return found


def _check_source(source: EncoderText, vocab: int) -> None:
    """Raises ValueError for lengths out of range, or token ids that the encoder does not have."""
    tokens, length = np.asarray(source.tokens), np.asarray(source.length)
    if tokens.ndim != 2 or length.shape != tokens.shape[:1]:
        raise ValueError(f"inputs: got an EncoderText of tokens {tokens.shape} with lengths {length.shape}, takes "
                         "[B, T] and [B]")
    width = tokens.shape[1]
    if (bad := np.flatnonzero((length < 1) | (length > width))).size:
        raise ValueError(f"inputs: got the length {length[bad[0]]} for source {bad[0]}, takes 1 to {width}, the width "
                         "of its tokens")
    wrong = (np.arange(width) < length[:, None]) & ((tokens < 0) | (tokens >= vocab))
    if wrong.any():
        row, at = np.argwhere(wrong)[0]
        raise ValueError(f"inputs: got token id {tokens[row, at]} in source {row}, which is outside the encoder's "
                         f"vocabulary of {vocab}")


def row_inputs(inputs: Any, count: int) -> Any:
    """Returns the inputs of the model as NumPy arrays, after a check of their first axis."""
    if isinstance(inputs, Iterator):
        raise wrong("inputs", inputs, f"a pytree of arrays [{count}, ...]")
    arrays = jax.tree.map(np.asarray, inputs)
    for path, leaf in jax.tree_util.tree_leaves_with_path(arrays):
        if leaf.shape[:1] != (count,):
            raise ValueError(f"inputs{jax.tree_util.keystr(path)}: got shape {leaf.shape} for {count} prompts, takes "
                             f"[{count}, ...]")
    return arrays


def guidance_of(lm: LM, method: Algorithm, budget: np.ndarray, scale: Any, negative: Any, said: Config,
                inputs: Any, size: int) -> tuple[np.ndarray | None, list[list[int]] | None]:
    """Reads the options of classifier-free guidance.

    Args:
        lm: the model.
        method: the decoding method.
        budget: maximum number of new tokens of each prompt.
        scale: the argument `guidance_scale`, a number or one for each prompt; 1: no guidance.
        negative: the argument `negative_prompts`, one or one for each prompt, or None.
        said: the model's generation config.
        inputs: the model's inputs beside tokens, or None.
        size: capacity of the cache.

    Returns:
        The scale of each prompt, `f32[prompts]`, or None for no guidance; and the token ids of each negative prompt, or
        None for the default ones.

    Raises:
        ValueError: negative prompts without a scale or for a canvas, or of another number than the prompts.
    """
    count = len(budget)
    scales = said.or_given("guidance_scale", scale, lambda name, x: per_row(name, x, count, np.float32, 1, "a number",
                                                                            np.isfinite))
    if scales is not None and (scales == 1).all():
        scales = None
    if scales is not None:
        check_guidance(method, lm.model, size, inputs)
    if negative is None:
        return scales, None
    if method.traits.canvas:
        raise ValueError("negative_prompts: a canvas is guided against masks in the prompt's place, without them")
    if scales is None:
        raise ValueError("negative_prompts: got some without a guidance_scale other than 1")
    ids = read_prompts(lm, negative, "negative_prompts")
    if len(ids) not in (1, count):
        raise ValueError(f"negative_prompts: got {len(ids)} for {count} prompts")
    ids = ids * (count // len(ids))
    check_room(lm, max(len(row) + int(new) for row, new in zip(ids, budget, strict=True)), "negative_prompts")
    return scales, ids
