"""How long to draft and from which source: arms, the rules that pick one of them, and what they are fitted to."""
