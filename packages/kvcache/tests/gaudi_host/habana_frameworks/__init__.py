"""What `trencadis.kvcache.vllm_gaudi` imports of Intel's bridge."""
