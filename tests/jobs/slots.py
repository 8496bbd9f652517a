"""Models, data and helpers of `test_slots.py` that other tests use too."""

from typing import Any

import numpy as np

COUNT = 12
RANDOM = np.random.default_rng(0)
PROMPTS = [RANDOM.integers(2, 15, int(n)).tolist() * (1 + i % 3) for i, n in enumerate(RANDOM.integers(2, 20, COUNT))]
NEW = [int(n) for n in RANDOM.integers(1, 26, COUNT)]
NEW[5] = 0
OPTIONS: dict[str, Any] = dict(max_new_tokens=NEW, temperature=[0.0, 0.9] * (COUNT // 2), seed=3, logprobs=1)
