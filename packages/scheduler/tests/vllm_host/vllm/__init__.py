"""The few names of vLLM that `trencadis.scheduler.vllm` imports."""
