"""Networks and layers with a recurrent state: Mamba, Mamba-2, RWKV-7, RWKV-X, and the blocks of RecurrentGemma."""
