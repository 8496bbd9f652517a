"""The round: types, state, `step`, `run`. It never learns of an algorithm and never imports flax."""
