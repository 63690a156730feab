"""Tensor parallelism: one model in several processes, the ranks, which take each step together."""
