"""The compiler's place."""
