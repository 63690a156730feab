"""The few names of SGLang that `trencadis.scheduler.sglang` imports."""
