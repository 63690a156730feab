"""Kernels written by hand for the device."""
