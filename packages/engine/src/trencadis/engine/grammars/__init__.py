"""Grammars of structured outputs: checked in a separate process, used in the core."""
