"""Checkpoints, and transformers' own modules with this engine's attention in them."""
