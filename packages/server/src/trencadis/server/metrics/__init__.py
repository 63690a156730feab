"""Prometheus metrics of the engine and of requests."""
