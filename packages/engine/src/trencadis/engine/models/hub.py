"""Whether the hub can be asked for a checkpoint. Imports neither PyTorch nor transformers."""

from __future__ import annotations

from trencadis.engine.errors import ModelError
from trencadis.engine.models.broken_files import reason_of

_ANSWER_SECONDS = 10.0
"""Longest wait for the hub, as long as huggingface_hub waits for the head of a file."""


def check_hub(name: str) -> None:
    """Raise `ModelError` where the cache has nothing of a hub id and the hub does not answer.

    huggingface_hub would try to reach it for half a minute for each file, in each process.
    """
    from huggingface_hub import try_to_load_from_cache  # noqa: PLC0415  (slow)
    from huggingface_hub.errors import HFValidationError  # noqa: PLC0415

    try:
        if isinstance(try_to_load_from_cache(name, "config.json"), str):
            return
    except HFValidationError:
        return  # no hub id: loading says what is wrong with it
    reason = why_unreachable(name)
    if reason:
        raise ModelError(
            f"{name} is neither a local checkpoint nor a hub id that can be reached: {reason}, and "
            "the cache has nothing of it. Check the network, or name a directory"
        )


def why_unreachable(name: str) -> str:
    """Why the hub cannot be asked for a hub id; "" where it answers, whatever it says."""
    from huggingface_hub import (  # noqa: PLC0415
        constants,
        get_hf_file_metadata,
        hf_hub_url,
    )
    from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled  # noqa: PLC0415

    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=_ANSWER_SECONDS)
    except HfHubHTTPError:
        return ""
    except OfflineModeIsEnabled:
        return "HF_HUB_OFFLINE is set"
    except Exception as error:  # those of the library that it uses for HTTP
        return f"{constants.ENDPOINT} does not answer ({reason_of(error)})"
    return ""
