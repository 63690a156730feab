"""Reasoning and tool calls in the text of an answer: found during the generation, and forced."""
