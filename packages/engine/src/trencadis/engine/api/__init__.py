"""The values that callers pass to an engine and get from it. They are frozen; none needs torch."""
