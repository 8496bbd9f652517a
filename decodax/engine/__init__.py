"""The engine under all front ends: reads requests, prefills prompts, runs batches, and refills rows that become free.
"""
