"""One layer of a decoder: its options, its attention, and how attention and MLP are added to the residual stream."""
