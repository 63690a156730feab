"""What callers use: AsyncEngine, LLM, request streams, tokenizer, incremental detokenizer."""
