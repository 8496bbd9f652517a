"""Models, data and helpers of `test_lookahead.py` that other tests use too."""

from decodax.models import Transformer, llama

MODEL = Transformer(llama(vocab=320, width=32, layers=3, heads=4, kv_heads=4, mlp=48, context=1024))
