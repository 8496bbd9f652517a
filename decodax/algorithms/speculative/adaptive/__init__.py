"""Draft lengths and sources that are chosen while decoding: arms, controllers that choose one, and functions that fit
or measure what they need."""
