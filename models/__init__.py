"""Networks: decoder-only transformers in flax.nnx, and the `Model` that wraps them for decoding."""

from decodax.models.config import DecoderConfig, Layer, NormConfig, llama
from decodax.models.decoder import Decoder
from decodax.models.diffusion import Diffusion
from decodax.models.rope import Rope
from decodax.models.transformer import Transformer

__all__ = ["Decoder", "DecoderConfig", "Diffusion", "Layer", "NormConfig", "Rope", "Transformer", "llama"]
