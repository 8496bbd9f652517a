"""Models, data and helpers of `test_diffusion_rule.py` that other tests use too."""

from decodax.models.diffusion import Diffusion
from tests.laws.cases import MASK

BLOCK, NEW = 4, 12
SPEAKS = {"full": Diffusion(MASK), "shifted": Diffusion(MASK, shift=True),
          "blocks": Diffusion(MASK, attention="block-causal", block=BLOCK),
          "shifted-blocks": Diffusion(MASK, shift=True, attention="block-causal", block=BLOCK),
          "prefix": Diffusion(MASK, shift=True, attention="causal-prefix", block=BLOCK),
          "canvas": Diffusion(MASK, attention="causal-prefix", block=BLOCK),
          "any-subset": Diffusion(MASK, attention="any-subset")}
