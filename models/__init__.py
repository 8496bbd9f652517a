"""Networks for decoding, each as a `Model`: decoder-only transformers in flax.nnx, encoder-decoders, Mamba, Mamba-2,
RWKV-7 and RWKV-X."""

from decodax.common.names import directory
from decodax.models.arc_encoder import ArcEncoder
from decodax.models.blocks.options import Layer, OutputGate
from decodax.models.config import DecoderConfig, NormConfig, llama
from decodax.models.cross_layer import cla, diffqkv, echo_att, yoco
from decodax.models.decoder import Decoder
from decodax.models.diffusion import Diffusion
from decodax.models.dual_chunk import dual_chunk
from decodax.models.encoder_decoder.config import EncoderDecoderConfig, t5
from decodax.models.encoder_decoder.network import EncoderDecoder
from decodax.models.images import Images
from decodax.models.inputs import AdapterRows, Embeddings, EncoderAudio, EncoderText
from decodax.models.linear import jrt, linear, linear_weights, linearized
from decodax.models.phd import Phd, phd
from decodax.models.recurrent.mamba import Mamba, MambaConfig
from decodax.models.recurrent.mamba2 import Mamba2, Mamba2Config
from decodax.models.recurrent.rwkv7 import Rwkv7, Rwkv7Config
from decodax.models.recurrent.rwkv_x import RwkvX, RwkvXConfig
from decodax.models.rope import Chunks, Rope
from decodax.models.routing import Experts
from decodax.models.transformer import Transformer

__all__ = ["AdapterRows", "ArcEncoder", "Chunks", "Decoder", "DecoderConfig", "Diffusion", "Embeddings", "EncoderAudio",
           "EncoderDecoder", "EncoderDecoderConfig", "EncoderText", "Experts", "Images", "Layer", "Mamba", "Mamba2",
           "Mamba2Config", "MambaConfig", "NormConfig", "OutputGate", "Phd", "Rope", "Rwkv7", "Rwkv7Config", "RwkvX",
           "RwkvXConfig", "Transformer", "cla", "diffqkv", "dual_chunk", "echo_att", "jrt", "linear", "linear_weights",
           "linearized", "llama", "phd", "t5", "yoco"]

__dir__ = directory(__all__)
