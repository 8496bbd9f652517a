"""The rules of a step: which positions are worked on, in which order and how many are unmasked, which are remasked, and
when the text ends.
"""
