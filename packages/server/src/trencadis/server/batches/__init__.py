"""OpenAI's Files and Batch APIs: requests in files, their answers, and what runs them."""
