"""Models of decodax in lm-evaluation-harness (Gao et al., EleutherAI): any of its tasks, with any algorithm and cache.

>>> from decodax.bench import harness  # doctest: +SKIP
>>> harness.evaluate("path/to/model", ["gsm8k", "arc_easy"], algorithm="prompt-lookup")  # doctest: +SKIP

Needs `pip install decodax[eval]`. Written for version 0.4.13.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from decodax.common.progress import bar
from decodax.core.algorithm import Algorithm
from decodax.front.generate import generate
from decodax.front.score import score
from decodax.io.load import LM, load

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
except ImportError as error:
    raise ImportError("decodax.bench.harness needs lm-evaluation-harness "
                      f"({error}): pip install 'decodax[eval]'") from error

POSITIONS = 2048
"""Maximum number of tokens for a model that does not state its context length."""

PIECE = 8
"""Number of batches between two writes to the harness's cache of answers."""


@dataclasses.dataclass
class RequestCounts:
    """Counts over all texts that `generate_until` has made so far.

    Attributes:
        texts: the number of texts.
        tokens: the number of new tokens.
        rounds: the number of forward passes of the model, counted for each text while its row was running.
        seconds: the time in the decode loops.
    """

    texts: int = 0
    tokens: int = 0
    rounds: int = 0
    seconds: float = 0.0

    @property
    def tokens_per_forward(self) -> float:
        return self.tokens / max(self.rounds, 1)


@register_model("decodax")
class HarnessLM(TemplateLM):
    """A model with the interface of lm-evaluation-harness: `lm_eval.simple_evaluate(model=HarnessLM("path/to/model"),
    ...)`.

    Importing this module registers the class as `model="decodax"`, with the arguments below as `model_args`.

    Texts are tokenized, truncated on the left if they are too long, scored and stopped as by the harness's own Hugging
    Face model. Requests are sorted by length. An answer depends only on its own request, and, if it is sampled, on the
    position of the request.

    Args:
        pretrained: the result of `decodax.load`, or what `decodax.load` takes.
        algorithm: the algorithm of `generate_until`, as in `decodax.generate`. Log-likelihoods always come from the
            model itself.
        cache: the cache of `generate_until`, as in `decodax.generate`.
        batch_size: the number of requests that run together; "auto" is 16.
        max_length: the maximum number of tokens of a context with its continuation; the default is the model's context
            length, or 2048 if the model states none.
        max_gen_toks: the maximum number of tokens of an answer, if the task does not set one.
        add_bos_token: whether texts begin with the tokens that the tokenizer adds. By default the tokenizer decides,
            except for a text that already begins with a BOS token.
        chat_template_args: variables of the chat template.
        think_end_token: the text that ends a reasoning; only what follows it counts as the answer.
        seed: seed of sampled answers.
        progress: whether to show progress bars.
        device: ignored; the harness passes it.
        max_batch_size: ignored; the harness passes it.
        options: arguments of `decodax.load`, such as dtype, weights, mesh and adapter.

    Raises:
        ValueError: the model has no tokenizer, or an argument is out of range; the message names it.
    """

    def __init__(self, pretrained: LM | str | os.PathLike[str], algorithm: Algorithm | str | None = None,
                 cache: Any = None, batch_size: int | str | None = None, max_length: int | None = None,
                 max_gen_toks: int = 256, add_bos_token: bool | None = None,
                 chat_template_args: Mapping[str, Any] | None = None, think_end_token: str | None = None,
                 seed: int = 0, progress: bool = True, device: Any = None, max_batch_size: Any = None, **options: Any):
        super().__init__()
        if isinstance(pretrained, LM):
            if options:
                raise TypeError(f"{', '.join(options)}: got arguments of decodax.load for a model that is already "
                                "loaded")
            self.lm = pretrained
        else:
            self.lm = load(os.fspath(pretrained), **options)
        if self.lm.tokenizer is None:
            raise ValueError(f"pretrained: {self.lm.name} has no tokenizer, which is needed to encode texts")
        self.tokenizer = self.lm.tokenizer
        self.batch_size = _count("batch_size", 16 if batch_size in (None, "auto") else batch_size)
        self.max_length = _count("max_length", max_length or self.lm.model.trained_positions
                                 or self.lm.model.max_positions or POSITIONS)
        self.max_gen_toks = _count("max_gen_toks", max_gen_toks)
        self.algorithm, self.cache, self.seed, self.progress = algorithm, cache, seed, progress
        self.add_bos_token, self.think_end_token = add_bos_token, think_end_token
        self.chat_template_args = dict(chat_template_args or {})
        self.counts = RequestCounts()

    @property
    def eot_token_id(self) -> int:
        own = self._special("eos_token")
        if own is None and not self.lm.eos:
            raise ValueError(f"{self.lm.name}: neither its tokenizer nor its generation config names an EOS token")
        return self.lm.eos[0] if own is None else own

    @property
    def prefix_token_id(self) -> int:
        """The token that precedes a text without context: the tokenizer's BOS, or EOS if it has no BOS."""
        own = self._special("bos_token")
        return self.eot_token_id if own is None else own

    def _special(self, name: str) -> int | None:
        text = self.tokenizer.special_tokens.get(name)
        return None if text is None else self.tokenizer.backend.token_to_id(text)

    @property
    def tokenizer_name(self) -> str:
        return self.lm.name.replace("/", "__")

    def chat_template(self, chat_template: bool | str = False) -> str | None:
        if not chat_template:
            return None
        name = chat_template if isinstance(chat_template, str) and chat_template in self.tokenizer.chat_templates \
            else "default"
        return self.tokenizer.chat_templates.get(name)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Returns the chat as one text. Without `add_generation_prompt`, the text ends after the content of the last
        message, so that the model continues that message."""
        text = self.tokenizer.chat_text(chat_history, add_generation_prompt=add_generation_prompt,
                                        **self.chat_template_args)
        if add_generation_prompt:
            return text
        last = chat_history[-1]["content"].lstrip()
        if last.rstrip() not in text:
            raise ValueError("chat template: changes the last message, so it cannot be continued")
        at = text.rindex(last.rstrip())
        return text[:at + len(last if text.startswith(last, at) else last.rstrip())]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        if add_special_tokens is None:
            begun = string.startswith(self.tokenizer.decode([self.prefix_token_id], skip_special_tokens=False))
            add_special_tokens = not begun and self.add_bos_token is not False
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def _encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Returns the tokens of a non-empty context and those of its continuation that are scored.

        As in the harness, spaces at the end of the context belong to the continuation, and the scored tokens are those
        that the whole text has in addition to the context. If it has none, because the tokenizer merges the start of
        the continuation with the end of the context, all tokens from the first difference on are scored.
        """
        own = context.rstrip()
        context, continuation = own, context[len(own):] + continuation
        whole, before = self.tok_encode(context + continuation), self.tok_encode(context)
        begun = len(before)
        if len(whole) <= begun:
            begun = next((i for i, (a, b) in enumerate(zip(whole, before, strict=False)) if a != b), len(whole))
            before = whole[:begun]
        # Some tokenizers drop a continuation at the end of a text, such as spaces.
        scored = whole[begun:] or self.tok_encode(continuation, add_special_tokens=False)
        return before or [self.prefix_token_id], scored

    def _loglikelihood_tokens(self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False,
                              **kwargs: Any) -> list[tuple[float, bool]]:
        """Returns for each continuation its log-probability and whether greedy decoding would produce it."""
        for asking, _, end in requests:
            if not end:
                raise ValueError(f"loglikelihood: got a continuation without tokens ({asking!r})")
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        asked = self._longest_first([len(c) + len(e) for _, c, e in requests])
        with bar(self.progress and not disable_tqdm, "log-likelihoods", len(requests)) as report:
            for some in self._pieces(asked):
                pairs = []
                for i in some:
                    _, context, end = requests[i]
                    if len(end) > self.max_length:
                        raise ValueError(f"loglikelihood: got a continuation of {len(end)} tokens, takes at most "
                                         f"max_length = {self.max_length}")
                    pairs.append((context[-(self.max_length + 1 - len(end)):], end))
                scores = score(self.lm, pairs, batch_size=self.batch_size)
                for i, total, greedy in zip(some, scores.sum.tolist(), scores.is_greedy.tolist(), strict=True):
                    found[i] = (total, greedy)
                    if requests[i][0] is not None:
                        self.cache_hook.add_partial("loglikelihood", requests[i][0], found[i])
                report(asked.index(some[-1]) + 1)
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Returns the log-probability of each whole text, scored in windows of `max_length` tokens; the last window
        overlaps the one before to be full."""
        texts = [[self.prefix_token_id, *self.tok_encode(request.args[0])] for request in requests]
        found = [0.0] * len(texts)
        asked = [i for i in self._longest_first([len(text) for text in texts]) if len(texts[i]) > 1]
        with bar(self.progress and not disable_tqdm, "log-likelihoods of texts", len(texts)) as report:
            for some in self._pieces(asked):
                scores = score(self.lm, [texts[i] for i in some], window=self.max_length, batch_size=self.batch_size)
                for i, total in zip(some, scores.sum.tolist(), strict=True):
                    found[i] = total
                    self.cache_hook.add_partial("loglikelihood_rolling", requests[i].args, total)
                report(len(texts) - len(asked) + asked.index(some[-1]) + 1)
        return found

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Returns the answer to each context, up to its first stop string."""
        alike: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            alike.setdefault(json.dumps(request.args[1], sort_keys=True, default=str), []).append(i)
        found = [""] * len(requests)
        done = 0
        with bar(self.progress and not disable_tqdm, "answers", len(requests)) as report:
            for group in alike.values():
                options, stop, new = self._options(requests[group[0]].args[1])
                room = self.max_length - new
                if room < 1:
                    raise ValueError(f"max_gen_toks: got {new}, takes less than max_length = {self.max_length}")
                contexts = [self.tok_encode(requests[i].args[0])[-room:] for i in group]
                for some in self._pieces(self._longest_first([len(context) for context in contexts])):
                    places = [group[j] for j in some]
                    # A reasoning may contain the stop strings of the answer after it.
                    out = generate(self.lm, [contexts[j] for j in some], max_new_tokens=new, request_ids=places,
                                   seed=self.seed, stop=None if self.think_end_token else stop or None,
                                   algorithm=self.algorithm, cache=self.cache, batch_size=self.batch_size,
                                   num_samples=1, **options)
                    for row, i in enumerate(places):
                        # Decode without the context: some tokenizers drop the first space of a text, as the harness
                        # expects of an answer.
                        text = self.tokenizer.decode(out.row(row))
                        found[i] = postprocess_generated_text(text, stop, self.think_end_token)
                        self.cache_hook.add_partial("generate_until", requests[i].args, found[i])
                    self._count(out.stats)
                    report(done := done + len(some))
        return found

    def _options(self, given: Mapping[str, Any]) -> tuple[dict[str, Any], list[str], int]:
        """Returns a task's `generation_kwargs` as arguments of `generate`, its stop strings, and the maximum length of
        an answer."""
        options = dict(normalize_gen_kwargs(dict(given), self.max_gen_toks))
        new = int(options.pop("max_gen_toks"))
        stop = [text for text in options.pop("until", None) or [] if text]
        for name in ("use_cache", "pad_token_id", "max_length"):       # arguments of Hugging Face's generate
            options.pop(name, None)
        if not options.get("do_sample"):
            options = {name: value for name, value in options.items()
                       if name not in ("temperature", "top_p", "top_k", "min_p", "typical_p")}
            options["do_sample"] = False
        # The text of an answer has no special tokens, so stop strings that are special tokens end it by their ids.
        special = {token.content: i for i, token in self.tokenizer.backend.get_added_tokens_decoder().items()
                   if token.special}
        ends = [special[text] for text in stop if text in special]
        if ends:
            options["eos_token_id"] = [*self.lm.eos, *ends]
        return options, stop, new

    def _count(self, made: Any) -> None:
        self.counts.texts += len(made.tokens)
        self.counts.tokens += int(made.tokens.sum())
        self.counts.rounds += int(made.rounds.sum())
        self.counts.seconds += made.seconds

    @staticmethod
    def _longest_first(lengths: Sequence[int]) -> list[int]:
        """Returns the indices of requests from the longest to the shortest, so that a request that does not fit in
        memory fails at the start, and batches have little padding."""
        return np.argsort(-np.asarray(lengths, np.int64), kind="stable").tolist()

    def _pieces(self, places: Sequence[int]) -> list[list[int]]:
        size = PIECE * self.batch_size
        return [list(places[i:i + size]) for i in range(0, len(places), size)]


def _count(name: str, value: Any) -> int:
    try:
        count = int(value)
    except (TypeError, ValueError):
        count = 0
    if count < 1 or count != float(value):
        raise ValueError(f"{name}: got {value!r}, takes a whole number of at least 1")
    return count


def evaluate(model: LM | str | os.PathLike[str] | HarnessLM, tasks: str | Sequence[Any], *, limit: float | None = None,
             num_fewshot: int | None = None, apply_chat_template: bool | str = False,
             gen_kwargs: Mapping[str, Any] | None = None, include_path: str | Sequence[str] | None = None,
             use_cache: str | None = None, options: Mapping[str, Any] | None = None, **model_args: Any
             ) -> dict[str, Any]:
    """Runs tasks of lm-evaluation-harness.

    Args:
        model: a `HarnessLM`, or its argument `pretrained`.
        tasks: names, or the harness's own task objects.
        limit: the number of requests for each task, or, below 1, their share; default all.
        num_fewshot: the number of worked examples before each question; by default the task decides.
        apply_chat_template: whether to ask questions as a chat.
        gen_kwargs: options of all answers, which override those of the tasks, such as `dict(temperature=0.7,
            do_sample=True)`.
        include_path: directories with more tasks.
        use_cache: path of a cache of answers; with it, a run that was killed continues where it stopped.
        options: further arguments of `lm_eval.simple_evaluate`, such as a `task_manager`, which takes seconds to make.
        model_args: arguments of `HarnessLM`, such as algorithm, cache, batch_size and weights.

    Returns:
        The result of `lm_eval.simple_evaluate`, with `RequestCounts` as a dictionary under "decodax".

    Raises:
        ValueError: as in `HarnessLM`, or a task is unknown.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    if isinstance(model, HarnessLM):
        if model_args:
            raise TypeError(f"{', '.join(model_args)}: got arguments of HarnessLM for a model that is one already")
        lm = model
    else:
        lm = HarnessLM(model, **model_args)
    given = dict(options or {})
    manager = given.pop("task_manager", None) or TaskManager(include_path=include_path)
    named = [tasks] if isinstance(tasks, str) else list(tasks)
    unknown = [name for name in named if isinstance(name, str) and not manager.match_tasks([name])]
    if unknown:
        from difflib import get_close_matches
        near = get_close_matches(unknown[0], manager.all_tasks, 3)
        raise ValueError(f"tasks: got {', '.join(unknown)}, which the harness does not have" +
                         (f"; similar names are {', '.join(near)}" if near else ""))
    found = lm_eval.simple_evaluate(
        model=lm, tasks=named, limit=limit, num_fewshot=num_fewshot, apply_chat_template=apply_chat_template,
        gen_kwargs=dict(gen_kwargs) if gen_kwargs else None, use_cache=use_cache, task_manager=manager,
        **given)
    assert found is not None
    return {**found, "decodax": {**dataclasses.asdict(lm.counts), "tokens_per_forward": lm.counts.tokens_per_forward}}
