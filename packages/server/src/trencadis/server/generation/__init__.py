"""From a request to choices: prompts become token ids, the engine's deltas become choices."""
