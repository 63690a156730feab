from __future__ import annotations

from typing import Any

import pytest

from trencadis.kvcache import UnsupportedLayer, require_paged_attention


def test_layers_of_full_attention_are_accepted() -> None:
    require_paged_attention(["full_attention", "attention"])
    require_paged_attention([])


@pytest.mark.parametrize("kind", ["sliding_attention", "mamba", "linear_attention", "recurrent"])
def test_other_layers_are_refused_by_number_and_kind(kind: str) -> None:
    with pytest.raises(UnsupportedLayer, match=f"layer 1 is '{kind}'"):
        require_paged_attention(["full_attention", kind])


@pytest.mark.parametrize("layers", [None, 5, "attention", [None], [["attention"]]])
def test_layers_that_are_no_names_are_refused(layers: Any) -> None:
    with pytest.raises(UnsupportedLayer):
        require_paged_attention(layers)
