"""A stand-in for Intel's ``habana_frameworks``, for tests: see ``../README.md``."""
