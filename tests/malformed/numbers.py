"""Numbers of the policy: out of range, of another type or shape, not finite, too many."""

import dataclasses
import decimal
import math
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import decodax as dx
from decodax.engine.request import Request
from tests.malformed.case import IDS, Case, Thing, World, loop


@dataclasses.dataclass(frozen=True)
class Range:
    """Which numbers an argument takes. `beside`: what it has no effect without. `neutral`: adds nothing."""

    low: float = -math.inf
    high: float = math.inf
    open_low: bool = False
    open_high: bool = False
    neutral: float | None = None
    whole: bool = False
    beside: tuple[tuple[str, Any], ...] = ()

    def takes(self, value: Any) -> bool:
        if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
            return False
        with np.errstate(over="ignore"):
            value = float(value) if abs(value) < 1e300 else math.inf
            if not math.isfinite(value if self.whole else np.float32(value)) or (self.whole and value != int(value)):
                return False
        return (value > self.low if self.open_low else value >= self.low) and \
            (value < self.high if self.open_high else value <= self.high)


DRY, XTC, MIRO, DYN = (("dry_multiplier", 1.0),), (("xtc_probability", 0.5),), (("mirostat_tau", 3.0),), \
    (("dynatemp_range", 0.5),)
NUMBERS = {
    "temperature": Range(0), "top_p": Range(0, 1, neutral=1), "min_p": Range(0, 1, neutral=0),
    "typical_p": Range(0, 1, open_low=True, neutral=1), "epsilon_cutoff": Range(0, 1, open_high=True, neutral=0),
    "eta_cutoff": Range(0, 1, open_high=True, neutral=0), "top_h": Range(0, 1, open_low=True),
    "repetition_penalty": Range(0, open_low=True, neutral=1),
    "encoder_repetition_penalty": Range(0, open_low=True, neutral=1), "presence_penalty": Range(neutral=0),
    "frequency_penalty": Range(neutral=0), "dry_multiplier": Range(0, neutral=0), "dry_base": Range(1, beside=DRY),
    "xtc_probability": Range(0, 1, neutral=0), "xtc_threshold": Range(0, 1, beside=XTC),
    "top_n_sigma": Range(neutral=0), "mirostat_tau": Range(0, open_low=True), "mirostat_eta": Range(0, beside=MIRO),
    "dynatemp_range": Range(0, neutral=0), "dynatemp_exponent": Range(0, beside=DYN),
    "top_k": Range(-1, whole=True), "no_repeat_ngram_size": Range(0, neutral=0, whole=True),
    "encoder_no_repeat_ngram_size": Range(0, neutral=0, whole=True),
    "penalty_last_n": Range(-1, whole=True, beside=(("presence_penalty", 1.0),)),
    "dry_allowed_length": Range(0, whole=True, beside=DRY), "dry_penalty_last_n": Range(-1, whole=True, beside=DRY)}


def numbers(rng: random.Random) -> Case:
    name = rng.choice(list(NUMBERS))
    span = NUMBERS[name]
    inside = rng.choice([0, 1, 2, 5, 0.5, 0.25, 1.5, 3, 0.125])
    x, y = inside, rng.choice([0.5, 1, 2, -1, -0.5, 1.5, 7])
    pool: list[Any] = [
        x, y, -x - 1, float(x), math.nan, math.inf, -math.inf, 1e39, 10 ** 40, 2.5, -1, np.float32(x), np.float64(y),
        np.int64(2), "0.5", b"1", True, False, Thing(), 1j, decimal.Decimal("0.5"), {}, {"a": 1}, {x}, iter([x, y]), [],
        [x], [x, y], [x, y, x], (x, y), [x, None], [x, "a"], [x, math.nan], [x, True], [[x], [y]], [[x, y]],
        np.array([x, y], np.float32), np.array([[x, y]]), np.array("x"), np.array([True, False]), np.array(x),
        np.array([x, y, x]), jnp.array([float(x), float(y)]), [x, math.inf], lambda: x, [x] * 1000, "", [""],
        np.array([None, x]), loop()]
    value = rng.choice(pool)
    each = value.tolist() if isinstance(value, (np.ndarray, jax.Array)) else value
    rows = list(each) if isinstance(each, (list, tuple)) else None
    good = len(rows) == 2 and all(v is None or span.takes(v) for v in rows) if rows is not None else span.takes(each)
    good &= not (isinstance(value, np.ndarray) and value.dtype.kind not in "iuf")
    others = dict(span.beside) | ({} if name == "temperature" else {"temperature": 1.0})
    what = f"{name}={value!r:.60}"
    if not good:
        front = rng.choice([dx.generate, lambda lm, ids, **given: dx.stream(lm, ids[0], **given)])
        if front is not dx.generate and rows is not None and len(rows) == 1 and span.takes(rows[0]):
            front = dx.generate       # one for each of one prompt
        return Case(what, lambda w: front(w.lm, IDS, **{name: value}, **others), (name,))
    wanted = rows or [each] * 2
    nothing = rows is None and span.neutral is not None and each == span.neutral

    def found(w: World, request: Request) -> bool:
        leaves = [np.asarray(x) for x in jax.tree.leaves(request.policy.transforms)]
        same = lambda leaf: leaf.shape == (2,) and all(
            v is None or np.isclose(min(float(v), 2.0 ** 30), leaf[i], rtol=1e-6) for i, v in enumerate(wanted))
        return nothing or (name == "top_k" and each in (0, -1)) or any(map(same, leaves))

    return Case(what, lambda w: Request.read(w.lm, IDS, **{name: value}, **others), (name,), found)
