"""Messages between the front and the core process, and the channel that carries them."""
