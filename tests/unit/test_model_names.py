"""Models by the names that people have for them."""

from __future__ import annotations

import pytest

from warmgraph_backends.host_api import models
from warmgraph_tools import small_transformers
from warmgraph_tools.inprocess import Host


def test_every_name_is_of_a_class_of_the_host(host: Host) -> None:
    from comfy import supported_models

    assert set(models._NAMES) <= set(vars(supported_models))


@pytest.mark.parametrize(
    ("kind", "name"), [("narrow15", "SD1.5"), ("narrowxl", "SDXL"), ("narrow20", "SD2")]
)
def test_a_checkpoint_is_called_by_what_its_file_is(host: Host, kind: str, name: str) -> None:
    assert models.model_name(host.load(kind)[0]) == name


def test_transformers_are_told_apart_by_their_files(host: Host) -> None:
    names = {
        kind: models.model_name(small_transformers.load(kind))
        for kind in ("flux1", "zimage", "wan_5b")
    }
    assert names == {"flux1": "Flux 1 dev", "zimage": "Z-Image", "wan_5b": "Wan 2.2 5B"}


def test_a_model_of_no_known_file_has_the_name_of_its_class(host: Host) -> None:
    model = host.load("narrowxl")[0].clone()

    class Unknown:
        pass

    before = model.model.model_config
    try:
        model.model.model_config = Unknown()
        assert models.model_name(model) == "SDXL"  # of the host's `model_base`
    finally:
        model.model.model_config = before
