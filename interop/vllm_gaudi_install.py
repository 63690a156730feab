"""For pytest's ``-p``: installs what `TRENCADIS_VLLM_GAUDI` names, as vLLM's loader does."""

from importlib.metadata import entry_points

for plugin in entry_points(group="vllm.general_plugins"):
    if plugin.name.startswith("trencadis"):
        plugin.load()()
