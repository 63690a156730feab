"""Model execution: worker (load, memory plan, warm-up), model runner, padded batches, sampler."""
