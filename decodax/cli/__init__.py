"""The command line of decodax: `commands` runs the commands, `arguments` describes what they take."""

from decodax.cli.commands import main

__all__ = ["main"]
