"""For pytest's ``-p``: installs what `TRENCADIS_VLLM_GAUDI` names, as vLLM's loader does."""

from importlib.metadata import entry_points

for plugin in entry_points(group="vllm.general_plugins"):
    if plugin.name.startswith("trencadis"):
        plugin.load()()

from vllm_gaudi.extension.bucketing import common  # noqa: E402

from trencadis.bucketing.vllm_gaudi import BucketingManager  # noqa: E402

assert common.HPUBucketingManager is BucketingManager
