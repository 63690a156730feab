"""The engine core: its step loop, its process, the request table, thermal monitoring."""
