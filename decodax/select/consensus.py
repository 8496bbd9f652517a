"""Rules that ask a model about the candidates, and a rule that corrects for truncated sampling."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np

from decodax.common.options import Count, NonNegative, Positive, Whole
from decodax.common.registry import SELECTS
from decodax.front.score import score
from decodax.select.candidates import Candidates, ModelRule, SelectionRule


def _log_softmax(x: np.ndarray, axis: int) -> np.ndarray:
    top = x.max(axis, keepdims=True)
    return x - top - np.log(np.exp(x - top).sum(axis, keepdims=True))


def equilibrium(generator: np.ndarray, discriminator: np.ndarray, rounds: int = 5000, rate: float = 0.1,
                regularization: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """Finds an equilibrium of the consensus game (Jacob et al., 2024).

    A generator gets the word "correct" or "incorrect" and produces a text. A discriminator sees the text and guesses
    the word. Both are rewarded if the guess is right, and penalized for their distance from their initial strategies.

    Both strategies are updated in `rounds` steps of no-regret learning. In step `t`, let `Q` be half the mean of the
    other player's strategies so far. The next strategy is proportional to `exp((Q + r log initial) / (1 / (rate t) +
    r))`.

    Args:
        generator: `f64[2, n]`, log-probabilities of the texts given "correct" and "incorrect"; each row is normalized.
        discriminator: `f64[n, 2]`, log-probabilities of "correct" and "incorrect" given a text; each row is normalized.
        rounds: number of steps.
        rate: learning rate.
        regularization: `r`, the weight of the initial strategies.

    Returns:
        The final strategies of generator and discriminator, as probabilities of the same shapes.
    """
    first_g, first_d = _log_softmax(np.asarray(generator, float), 1), _log_softmax(np.asarray(discriminator, float), 1)
    g, d = np.exp(first_g), np.exp(first_d)
    sum_g, sum_d = np.zeros_like(g), np.zeros_like(d)
    for t in range(1, rounds + 1):
        sum_g, sum_d = sum_g + g, sum_d + d
        scale = 1 / (rate * t) + regularization
        g = np.exp(_log_softmax((sum_d.T / (2 * t) + regularization * first_g) / scale, 1))
        d = np.exp(_log_softmax((sum_g.T / (2 * t) + regularization * first_d) / scale, 1))
    return g, d


def ask_generator(prompt: Any, value: str) -> str:
    """Returns the text after which the generator's probability of an answer is computed; `value` is "correct" or
    "incorrect"."""
    return f"{prompt}\nGive an answer that is {value}.\nAnswer: "


def ask_discriminator(prompt: Any, text: str) -> str:
    """Returns the text after which the discriminator's probabilities of "correct" and "incorrect" are computed."""
    return f"{prompt}\nProposed answer: {text.strip()}\nIs the proposed answer correct or incorrect? It is "


@SELECTS.register("equilibrium-ranking", "The Consensus Game: Language Model Generation via Equilibrium Search",
                  "Jacob et al. 2024", "what the model as a generator and as a judge of texts agree on")
@dataclasses.dataclass(frozen=True)
class EquilibriumRanking(ModelRule):
    """Ranks the candidates by an equilibrium of generator and discriminator (Jacob et al., 2024); see `equilibrium`.

    One model plays both parts, asked in two ways. Equal texts count once.

    Attributes:
        lm: the model that is asked. None: the model that generates the candidates.
        generator: makes, from a prompt and "correct" or "incorrect", the text after which an answer is scored.
        discriminator: makes, from a prompt and a candidate, the text after which the words "correct" and "incorrect"
            are scored.
        by: the player whose strategy ranks the candidates: "discriminator" or "generator".
        rounds: number of learning steps.
        rate: learning rate.
        regularization: weight of the initial strategies.
    """

    generator: Callable[[Any, str], str] = ask_generator
    discriminator: Callable[[Any, str], str] = ask_discriminator
    by: Literal["discriminator", "generator"] = "discriminator"
    rounds: Count = 5000
    rate: Positive = 0.1
    regularization: NonNegative = 0.1

    def scores(self, candidates: Candidates) -> np.ndarray:
        texts, values = list(dict.fromkeys(candidates.texts)), ("correct", "incorrect")
        asked = [self.generator(candidates.prompt, v) for v in values]
        made = score(self.model, [(a, t) for a in asked for t in texts]).sum.reshape(2, -1)
        told = score(self.model, [(self.discriminator(candidates.prompt, t), v) for t in texts for v in values])
        g, d = equilibrium(made, told.sum.reshape(-1, 2), self.rounds, self.rate, self.regularization)
        best = g[0] if self.by == "generator" else d[:, 0]
        return best[[texts.index(t) for t in candidates.texts]]


def apart(sums: np.ndarray, tokens: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the log-probability that each label is written and not continued to a longer label; "1" begins "10", for
    example.

    Args:
        sums: `f64[n]`, log-probabilities of the labels' tokens.
        tokens: `i32[m]` for each label.

    Returns:
        A list of `n` floats.
    """
    known = {tuple(row.tolist()): float(value) for row, value in zip(tokens, sums, strict=True)}
    begins = lambda a, b: len(a) < len(b) and b[:len(a)] == a
    out = []
    for row, value in zip(tokens, sums, strict=True):
        longer = [label for label in known if begins(tuple(row.tolist()), label)]
        # those that begin with another longer one are part of it
        first = [label for label in longer if not any(begins(other, label) for other in longer)]
        taken = sum(math.exp(known[label] - value) for label in first)
        out.append(value + math.log1p(-taken) if taken < 1 else -math.inf)
    return np.array(out)


def ask_which(prompt: Any, texts: Sequence[str]) -> str:
    """Returns a prompt that lists several answers and asks for the number of the best one."""
    listed = "".join(f"Answer {i + 1}: {text.strip()}\n" for i, text in enumerate(texts))
    return f"{prompt}\n{listed}The best of these answers, by what most of them say, is answer "


@SELECTS.register("universal-self-consistency", "Universal Self-Consistency for Large Language Models",
                  "Chen et al. 2023", "what a model names that sees all candidates")
@dataclasses.dataclass(frozen=True)
class Asked(ModelRule):
    """Shows all candidates to a model in one prompt and asks for the best one (universal self-consistency: Chen et al.,
    2023).

    Nothing is generated: the probability of each candidate's number, from 1 on, is computed after the prompt. With ten
    candidates or more, the probability of a number that begins a longer one ("1" and "10") excludes the longer ones.
    CHOPS (Khairi et al., 2025), in which the model writes a checklist first, is not included.

    Attributes:
        lm: the model that is asked. None: the model that generates the candidates.
        ask: makes, from a prompt and the candidates, the text after which a number is scored.
    """

    ask: Callable[[Any, Sequence[str]], str] = ask_which

    def scores(self, candidates: Candidates) -> np.ndarray:
        asked = self.ask(candidates.prompt, candidates.texts)
        found = score(self.model, [(asked, str(i + 1)) for i in range(len(candidates))])
        return apart(found.sum, found.tokens)


@SELECTS.register("local-normalization", "Local Normalization Distortion and the Thermodynamic Formalism of Decoding "
                  "Strategies for Large Language Models", "Kempton and Burrell 2025",
                  "a draw by what truncation took from each")
@dataclasses.dataclass(frozen=True)
class Corrected(SelectionRule):
    """Draws a candidate with a weight that corrects for truncated sampling (local normalization distortion: Kempton and
    Burrell, 2025).

    Top-k, top-p and similar rules renormalize at each token, so that texts whose steps keep little probability are
    sampled too often. With the product of the kept probabilities as its weight, a candidate is a sample of the model
    itself, restricted to the texts that the truncation allows; the drawn candidate approaches this distribution with
    many candidates. Temperatures are corrected as well. The scores are the normalized weights.

    Attributes:
        seed: seed of the draw, combined with `Candidates.address`.
    """

    seed: Whole = 0

    def scores(self, candidates: Candidates) -> np.ndarray:
        if candidates.log_weights is None:
            raise ValueError("log_weights: got None, but the rule weighs candidates by them")
        w = np.asarray(candidates.log_weights, float)
        return np.exp(_log_softmax(w, 0))

    def choose(self, candidates: Candidates) -> Any:
        chosen = super().choose(candidates)
        rng = candidates.rng(self.seed)
        p = chosen.scores / chosen.scores.sum()
        return dataclasses.replace(chosen, index=int(rng.choice(len(candidates), p=p)))
