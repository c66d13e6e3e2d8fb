"""Two cards that are both the processor, told apart, and the host's own nodes that use several."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from warmgraph_backends.attaching.attached import KEY
from warmgraph_backends.runtime.session import Session

FIRST, SECOND = torch.device("cpu"), torch.device("cpu", 0)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The host finds two cards."""
    import comfy.model_management as management

    # The host's split takes no list with a patcher that is gone, as others' tests leave one.
    loaded = management.current_loaded_models
    loaded[:] = [each for each in loaded if each.model is not None]
    monkeypatch.setattr(
        management, "get_all_torch_devices", lambda exclude_current=False: [FIRST, SECOND]
    )
    yield


def split(model: Any) -> Any:
    """MultiGPU CFG Split over both."""
    from comfy_extras.nodes_multigpu import MultiGPUCFGSplitNode

    return MultiGPUCFGSplitNode.execute(model, 2).result[0]


def put(model: Any, device: torch.device) -> Any:
    """What Select Model Device makes of a model on another card: a copy with weights of its own."""
    from comfy_extras.nodes_multigpu import _retarget_patcher

    return _retarget_patcher(model.clone(), device, torch.device("cpu"))


def session_of(model: Any) -> Session:
    """What Compile Model hung on a MODEL."""
    session: Session = model.get_attachment(KEY)
    return session
