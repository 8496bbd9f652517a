"""The toy of the laws as a diffusion model, and its forward in NumPy: float64, all positions at once, no MASK."""

import numpy as np

import decodax as dx
from decodax.algorithms.diffusion import MaskedDiffusion
from decodax.io.load import LM
from decodax.models.diffusion import Diffusion
from tests.laws.cases import MASK, VOCABULARY, model, prompts

NETWORK, WEIGHTS = model("toy")
SPEAKS = {"full": Diffusion(MASK), "blocks": Diffusion(MASK, attention="block-causal", block=4),
          "canvas": Diffusion(MASK, attention="causal-prefix", block=4)}
PROMPTS = prompts(3, longest=9)


def lm(speaks: str = "full", eos: int | None = None, **options) -> LM:
    config = {} if eos is None else {"eos_token_id": eos}
    return LM(NETWORK, WEIGHTS, VOCABULARY, diffusion=SPEAKS[speaks], generation_config=config, **options)


def run(alg: MaskedDiffusion, new: int = 16, speaks: str = "full", **options) -> tuple[list[list[int]], list[int]]:
    """New tokens and rounds of each prompt, greedy unless options say otherwise."""
    out = dx.generate(lm(speaks, options.pop("eos", None)), options.pop("ids", PROMPTS), max_new_tokens=new,
                      algorithm=alg, **options)
    return [out.row(i).tolist() for i in range(len(out))], out.stats.rounds.tolist()


def raw(x: np.ndarray) -> np.ndarray:
    """Logits `f64[n, V]` of a text in which everybody sees everybody."""
    w = {k: np.asarray(v, np.float64) for k, v in WEIGHTS.items()}
    h = w["embed"][x] + w["place"][np.arange(len(x)) % 64]
    weight = np.exp(0.3 * h @ h.T - (0.3 * h @ h.T).max(-1, keepdims=True))
    return np.tanh(h + weight / weight.sum(-1, keepdims=True) @ h @ w["mix"]) @ w["head"]


def normal(logits: np.ndarray) -> np.ndarray:
    """Log-probabilities without MASK."""
    x = logits.copy()
    x[:, MASK] = -np.inf
    top = x.max(-1, keepdims=True)
    return x - top - np.log(np.exp(x - top).sum(-1, keepdims=True))


def forward(x: np.ndarray) -> np.ndarray:
    return normal(raw(x))
