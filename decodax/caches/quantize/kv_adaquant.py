"""KV-AdaQuant: KIVI's quantization with more bits for keys than for values ("More for Keys, Less for Values: Adaptive
KV Cache Quantization", Hariri et al., 2025)."""

from __future__ import annotations

from decodax.caches.quantize.kivi import Bits, KIVICodec
from decodax.caches.quantize.quantized import QuantizedConfig
from decodax.common.options import Count
from decodax.common.registry import CACHES


@CACHES.register("kv-adaquant", "More for Keys, Less for Values: Adaptive KV Cache Quantization", "Hariri et al. 2025",
                 family="quantize")
def kv_adaquant(key_bits: Bits = 4, value_bits: Bits = 2, group_size: Count = 32,
                residual_length: Count = 128) -> QuantizedConfig:
    """Keeps all tokens as `kivi` does, with more bits for keys than for values.

    Keys have larger norms than values, so their quantization errors matter more. The paper recommends 4 and 2 bits.

    Args:
        key_bits, value_bits: number of bits of each number of a key and of a value.
        group_size: number of values that share a scale.
        residual_length: number of tokens that are quantized together; the latest tokens are unquantized until there are
            that many. A multiple of `group_size`.
    """
    return QuantizedConfig(KIVICodec(key_bits, value_bits, group_size), residual_length, "kv-adaquant")
