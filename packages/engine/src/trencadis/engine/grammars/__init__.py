"""Grammars of structured outputs: checked in a process apart, compiled and matched in the core."""
