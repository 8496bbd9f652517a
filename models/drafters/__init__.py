"""Networks of trained drafters: heads that read a target's hidden states and predict further tokens."""
