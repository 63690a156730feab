"""For pytest's ``-p``: installs what `TRENCADIS_VLLM_GAUDI` names, as vLLM's loader does.

First come names that the plugin's model runner needs to be imported: the bridge's that our stand-in
lacks, and one of the version of vLLM that the plugin is for.
"""

import sys
from importlib.metadata import entry_points
from unittest.mock import MagicMock

import torch
import vllm.multimodal.utils

import habana_frameworks.torch as htorch

htorch.torch = torch
EXPERIMENTAL = "habana_frameworks.torch.utils.experimental"
sys.modules.setdefault(EXPERIMENTAL, MagicMock())
vars(vllm.multimodal.utils).setdefault("group_mm_kwargs_by_modality", None)

for plugin in entry_points(group="vllm.general_plugins"):
    if plugin.name.startswith("trencadis"):
        plugin.load()()

from vllm_gaudi.extension.bucketing import common  # noqa: E402

from trencadis.bucketing.vllm_gaudi import BucketingManager  # noqa: E402

assert common.HPUBucketingManager is BucketingManager
