"""Creates methods from the generation arguments of transformers: beam search, contrastive search and DoLa.

They are imported when an argument asks for one, so that plain decoding does not wait for them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, cast

from decodax.common.arguments import flag, is_whole, number, plain, positive, shown, whole, wrong
from decodax.common.table import named
from decodax.core.algorithm import Algorithm
from decodax.core.loaded import Loaded
from decodax.sampling.neutral import is_neutral, is_zero

ARGUMENTS = (*named("beams"), "penalty_alpha")
"""Arguments of `generate` that `read` uses."""


CANDIDATES = 4
"""Number of candidates of contrastive search if `top_k` is not given."""


def read(lm: Loaded, given: Mapping[str, Any], said: Callable[..., Any]) -> Algorithm | None:
    """Returns the search for the arguments of a call and a generation config; None for one beam without a penalty.

    Args:
        lm: the result of `decodax.load`.
        given: arguments of the call, among them those of `ARGUMENTS`.
        said: `said(name, given, read, default)` returns the argument or else the config's value, converted by `read`.

    Raises:
        ValueError, TypeError: an argument is out of its range, or has no effect without beams.
    """
    value = lambda name, read, default: said(name, given.get(name), read, default)
    width = value("num_beams", lambda name, x: whole(name, x, 1), 1)
    alpha = value("penalty_alpha", number, 0.0)
    if alpha:
        return _contrastive(lm, given, said, alpha, width)
    options = dict(
        length_penalty=value("length_penalty", number, 1.0), early_stopping=value("early_stopping", _early, False),
        patience=value("patience", positive, 1.0), diversity_penalty=value("diversity_penalty", number, 0.0),
        groups=value("num_beam_groups", lambda name, x: whole(name, x, 1), 1),
        renormalize=value("renormalize_logits", flag, False))
    if width == 1:
        asked = [name for name in named("beams") if name not in ("num_beams", "renormalize_logits")
                 and not is_neutral(name, given.get(name))]
        if asked:
            raise ValueError(f"{asked[0]}: got {shown(given[asked[0]])} with one beam; takes num_beams=2 or more")
        return None
    if width % options["groups"]:
        raise ValueError(f"num_beam_groups: got {options['groups']} for num_beams={width}, takes a divisor of it")
    from decodax.algorithms.beams.algorithm import BeamSearch
    return BeamSearch(width, **options)


def _contrastive(lm: Loaded, given: Mapping[str, Any], said: Callable[..., Any], alpha: float, width: int
                 ) -> Algorithm:
    if width != 1:
        raise ValueError(f"penalty_alpha: got {shown(alpha)} with num_beams={width}; takes one beam")
    if not 0 <= alpha <= 1:
        raise ValueError(f"penalty_alpha: got {shown(alpha)}, takes a number from 0 to 1")
    if any(not is_neutral(name, x) and not is_zero(x) for name, x in (
            ("temperature", given.get("temperature")), ("do_sample", given.get("do_sample")))):
        raise ValueError(f"penalty_alpha: got {shown(alpha)} with a temperature; contrastive search is greedy")
    k = said("top_k", given.get("top_k"), lambda name, x: whole(name, x, 1), CANDIDATES)
    from decodax.algorithms.contrastive.contrastive_search import ContrastiveSearch, hidden_width
    return ContrastiveSearch(hidden_width(lm), alpha, min(k, lm.vocab_size))


def is_beam_search(search: Algorithm | None) -> bool:
    """True if a result of `read` is beam search."""
    if search is None:
        return False
    from decodax.algorithms.beams.algorithm import BeamSearch
    return isinstance(search, BeamSearch)


def read_dola(lm: Any, given: Any, said: Callable[..., Any]) -> Any:
    """Returns the model for the argument `dola_layers` or the key of a generation config.

    Args:
        lm: the result of `decodax.load`; returned as it is without `dola_layers`.
        given: the argument.
        said: as for `read`.
    """
    def wrapped(name: str, layers: Any) -> Any:
        takes = "'low', 'high', or numbers of layers"
        rows = plain(name, layers, takes)
        if not isinstance(rows, str) and not (isinstance(rows, list) and all(map(is_whole, rows))):
            raise wrong(name, layers, takes)
        from decodax.algorithms.contrastive.dola import dola
        return dola(lm, cast(Any, rows))

    return said("dola_layers", given, wrapped, lm)


def _early(name: str, x: Any) -> Any:
    if isinstance(x, str) and x == "never":
        return x
    try:
        return flag(name, x)
    except ValueError:
        raise wrong(name, x, "True, False or 'never'") from None
