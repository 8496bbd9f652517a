"""Problems with checkable answers, in the languages of the shipped models: their prompts, and when an answer is
right. A seed decides the problems.

- `puzzles`: lists, sums, brackets and sudoku, for `tasks-diffusion`.
- `recall`: questions on long texts, for `recall`.
- `sums`: sums worked out step by step, for `sums`.
- `numerals`: numbers written in words, for `numerals`.
"""
