"""Published variants of beam search that are options of `BeamSearch`: controlled patience, diverse groups, and
regularisers of surprisal."""

from __future__ import annotations

from decodax.algorithms.beams.beam_search import BeamSearch, Counting
from decodax.algorithms.beams.uid import UID, Kind
from decodax.common.options import Count, NonNegative, Positive
from decodax.common.registry import ALGORITHMS


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
