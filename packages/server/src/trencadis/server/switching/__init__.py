"""Switches between the models of one engine: by an operator, and by the requests themselves."""
