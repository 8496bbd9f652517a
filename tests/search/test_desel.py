"""DeSel: lists against their definition."""

import numpy as np
import pytest

from decodax import search
from tests.algorithms.contrastive.followers import following
from tests.search.letters import LETTERS, filling

pytestmark = pytest.mark.wide


def test_items_and_scores_are_by_their_definition() -> None:
    lm, prompts, n = filling(), ["kpt", "cq"], 6
    given = dict(items=search.separated("p"), max_new_tokens=14, temperature=1.2, seed=3)
    found = {how: search.desel(lm, prompts, n, threshold=how, **given) for how in ("mean", "least", -2.0)}   # type: ignore[arg-type]
    letters, added = LETTERS.split(), []
    for p, prompt in enumerate(prompts):
        texts = found["mean"].texts[p]
        assert len(texts) == n + 1 and len(set(texts)) > 2
        best: dict[str, float] = {}
        for text in texts:
            ids = [letters.index(c) for c in prompt + text]
            log_p = [following(lm, [ids[:i]])[0][ids[i]] for i in range(len(prompt), len(ids))]
            place = 0
            for item in text.split("p"):
                if item:
                    best[item] = max(best.get(item, -np.inf), float(np.mean(log_p[place:place + len(item)])))
                place += len(item) + 1
        own = list(dict.fromkeys(item for item in texts[0].split("p") if item))
        cuts = {"mean": np.mean([best[i] for i in own]), "least": min(best[i] for i in own), -2.0: -2.0}
        for how, out in found.items():
            others = sorted((i for i in best if i not in own and best[i] >= cuts[how]), key=lambda i: -best[i])
            assert out.items[p] == own + others and out.greedy[p] == len(own)
            np.testing.assert_allclose(out.scores[p], [best[i] for i in own + others], atol=1e-4)
            np.testing.assert_allclose(out.thresholds[p], cuts[how], atol=1e-4)
            added.append(len(others))
    assert min(added) < max(added)
    with pytest.raises(ValueError, match="threshold: got 'best'"):
        search.desel(lm, "a", threshold="best")      # type: ignore[arg-type]
