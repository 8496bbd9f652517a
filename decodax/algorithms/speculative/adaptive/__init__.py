"""The length and the source of drafts, chosen while decoding: arms, controllers that pick one, and what is fitted."""
