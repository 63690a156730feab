"""What our modules import of vLLM's plugin for Gaudi, 091bbad."""
