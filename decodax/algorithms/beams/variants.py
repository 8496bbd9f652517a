"""Beam search by name, and published variants that are options of `BeamSearch`: controlled patience, diverse groups,
and regularisers of surprisal."""

from __future__ import annotations

from typing import Any

from decodax.algorithms.beams.algorithm import BeamSearch, Counting, EarlyStopping
from decodax.algorithms.beams.uid import UID, Kind
from decodax.common.options import Count, NonNegative, Positive
from decodax.common.registry import ALGORITHMS


@ALGORITHMS.register("beam-search", "Beam search", "", family="search")
def beam_search(width: Count = 4, length_penalty: float = 1.0, early_stopping: EarlyStopping = False, *,
                num_beam_groups: Count = 1, diversity_penalty: NonNegative = 0.0, patience: Positive = 1.0,
                renormalize: bool = False, draft: Any = None) -> BeamSearch:
    """Finds likely texts by keeping the `width` best beginnings of each prompt.

    For tasks with one right answer, such as translation. Rules and options are those of transformers:
    `algorithms.beam_search(4)` is its `num_beams=4`. The result has the best text of each prompt, or the best
    `num_samples`; `findings` has their scores.

    Args:
        width: number of beams of a prompt.
        length_penalty: exponent of the length by which a score is divided: positive prefers long texts, negative short
            ones, 0 compares log-probabilities.
        early_stopping: when the search of a prompt ends. True: when `width` texts have finished. False: when no beam
            would be among the best if it ended now. "never": when none could be at any length.
        num_beam_groups: number of groups of beams (diverse beam search). In each step the groups are extended one after
            the other.
        diversity_penalty: amount subtracted from the score of a token for each beam of an earlier group that has taken
            it in this step.
        patience: with `early_stopping=True`, number of finished texts that end the search, in multiples of `width`.
        renormalize: True: normalise log-probabilities again after penalties and bans.
        draft: a draft or source of drafts; beams then make several steps in one forward pass, with the same result.
            None: one step in each forward pass.
    """
    return BeamSearch(width, length_penalty=length_penalty, early_stopping=early_stopping, groups=num_beam_groups,
                      diversity_penalty=diversity_penalty, patience=patience, renormalize=renormalize, draft=draft)


@ALGORITHMS.register("patience-beam-search", "Beam Decoding with Controlled Patience", "Kasai et al. 2022",
                     family="search")
def patience_beam_search(width: Count = 4, patience: Positive = 2.0, length_penalty: float = 1.0) -> BeamSearch:
    """Beam search that ends when `patience * width` texts have finished.

    A small change that improves translations and summaries.

    Args:
        width: number of beams of a prompt.
        patience: number of finished texts that end the search, in multiples of `width`; 1 is the usual early stopping.
        length_penalty: exponent of the length by which a score is divided.
    """
    return BeamSearch(width, length_penalty=length_penalty, early_stopping=True, patience=patience)


@ALGORITHMS.register("diverse-beam-search",
                     "Diverse Beam Search: Decoding Diverse Solutions from Neural Sequence Models",
                     "Vijayakumar et al. 2016", family="search")
def diverse_beam_search(width: Count = 4, groups: Count = 2, diversity_penalty: NonNegative = 0.5,
                        counting: Counting = "chosen", length_penalty: float = 1.0) -> BeamSearch:
    """Beam search with groups of beams, which lose score for tokens that earlier groups have taken in the same step.

    For several answers that differ from one another.

    Args:
        width: number of beams of a prompt, a multiple of `groups`.
        groups: number of groups.
        diversity_penalty: amount subtracted from the score of a token for each time that earlier groups have taken it.
        counting: tokens that count as taken: those "chosen" by live beams, as in transformers, or those among the
            "candidates", as in fairseq.
        length_penalty: exponent of the length by which a score is divided.
    """
    return BeamSearch(width, groups=groups, diversity_penalty=diversity_penalty, counting=counting,
                      length_penalty=length_penalty)


@ALGORITHMS.register("uid-beam-search", "If beam search is the answer, what was the question?", "Meister et al. 2020",
                     family="search")
def uid_beam_search(width: Count = 4, kind: Kind = "greedy", strength: NonNegative = 1.0,
                    length_penalty: float = 0.0) -> BeamSearch:
    """Beam search with a regulariser that prefers texts with evenly spread surprisal.

    Avoids the short and empty texts that wide beams find.

    Args:
        width: number of beams of a prompt.
        kind: kind of the regulariser, see `decodax.algorithms.beams.UID`.
        strength: weight of the regulariser.
        length_penalty: exponent of the length by which a score is divided.
    """
    return BeamSearch(width, uid=UID(kind), strength=strength, length_penalty=length_penalty)
