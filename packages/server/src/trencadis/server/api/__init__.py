"""The data that the OpenAI API defines: requests, messages, log-probabilities, token usage."""
