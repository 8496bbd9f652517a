"""The laws' small network once more, in NumPy and float64: what published rules are transcribed with."""

import numpy as np

from tests.laws.cases import MASK, model


class Network:
    """A Llama layer by layer; `x` is `[n, D]`, keys and values are `[n, G, d]`."""

    def __init__(self):
        network, weights = model("llama")
        self.c = network.config
        flat = lambda w: {k: flat(v) if isinstance(v, dict) else np.asarray(v, np.float64) for k, v in w.items()}
        self.w = flat(weights)
        self.layers = range(len(self.c.layers))

    def embed(self, tokens):
        return self.w["embed"][np.asarray(tokens)]

    def norm(self, x, scale):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + self.c.norm.eps) * scale

    def project(self, layer, x, positions):
        """Rotated queries and keys, and values, of the stream before a layer."""
        own = self.w["layers"][str(layer)]
        normed = self.norm(x, own["attn_in"]["scale"])
        q, k, v = (normed @ own["attn"][name]["kernel"] for name in "qkv")
        q, k, v = (y.reshape(len(y), -1, self.c.head_dim) for y in (q, k, v))
        half = self.c.head_dim // 2
        angle = np.asarray(positions)[:, None] * 10_000.0 ** (-np.arange(half) / half)
        cos, sin = np.cos(angle)[:, None], np.sin(angle)[:, None]
        turn = lambda y: np.concatenate([y[..., :half] * cos - y[..., half:] * sin,
                                         y[..., half:] * cos + y[..., :half] * sin], -1)
        return turn(q), turn(k), v

    def attend(self, layer, q, k, v, seen=True):
        """What attention adds to the stream `[n, D]`, and its weights `[H, n, keys]`; `seen` is `[n, keys]`."""
        share = q.shape[1] // k.shape[1]
        k, v = np.repeat(k, share, 1), np.repeat(v, share, 1)
        scores = np.einsum("qhd,khd->hqk", q, k) * self.c.head_dim ** -0.5
        scores = np.where(seen, scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights = weights / weights.sum(-1, keepdims=True)
        out = np.einsum("hqk,khd->qhd", weights, v).reshape(len(q), -1)
        return out @ self.w["layers"][str(layer)]["attn"]["o"]["kernel"], weights

    def mlp(self, layer, x):
        """What the other half of a layer adds."""
        own = self.w["layers"][str(layer)]
        x = self.norm(x, own["mlp_in"]["scale"])
        gate = x @ own["mlp"]["gate"]["kernel"]
        return (gate / (1 + np.exp(-gate)) * (x @ own["mlp"]["up"]["kernel"])) @ own["mlp"]["down"]["kernel"]

    def log_probs(self, x):
        """Of the tokens but MASK, from the stream after the last layer."""
        logits = self.norm(x, self.w["norm"]["scale"]) @ self.w["lm_head"]["kernel"]
        logits[:, MASK] = -np.inf
        logits = logits - logits.max(-1, keepdims=True)
        return logits - np.log(np.exp(logits).sum(-1, keepdims=True))

    def forward(self, tokens, positions, cache=None, seen=True):
        """Log-probabilities at `positions`. `cache`: keys and values `[layer][text, G, d]`, in which those of
        `positions` are replaced first and all are attended to; None: they are the text."""
        x, positions = self.embed(tokens), np.asarray(positions)
        if cache is None:
            cache = self.empty(len(positions))
        for i in self.layers:
            q, k, v = self.project(i, x, positions)
            cache[0][i][positions], cache[1][i][positions] = k, v
            x = x + self.attend(i, q, cache[0][i], cache[1][i], seen)[0]
            x = x + self.mlp(i, x)
        return self.log_probs(x)

    def empty(self, size):
        """Keys and values for a text of so many tokens."""
        zeros = lambda: [np.zeros((size, self.c.kv_heads, self.c.head_dim)) for _ in self.layers]
        return zeros(), zeros()
