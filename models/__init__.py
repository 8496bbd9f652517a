"""Networks: decoder-only transformers in flax.nnx, T5, and the `Model`s that wrap them for decoding."""

from decodax.models.config import DecoderConfig, Experts, Layer, NormConfig, cla, diffqkv, echo_att, llama, yoco
from decodax.models.decoder import Decoder
from decodax.models.diffusion import Diffusion
from decodax.models.dual_chunk import dual_chunk
from decodax.models.rope import Chunks, Rope
from decodax.models.t5 import T5, EncoderText, T5Config
from decodax.models.transformer import AdapterRows, Embeddings, Transformer

__all__ = ["T5", "AdapterRows", "Chunks", "Decoder", "DecoderConfig", "Diffusion", "Embeddings", "EncoderText",
           "Experts", "Layer", "NormConfig", "Rope", "T5Config", "Transformer", "cla", "diffqkv", "dual_chunk",
           "echo_att", "llama", "yoco"]
