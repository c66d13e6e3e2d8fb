"""Accepts the host's objects, or leaves them if this host lacks a name."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

from ..deepcache.cache import DeepCache
from ..errors import RequirementError
from ..host_api.controlnets import is_control
from ..host_api.models import is_model
from ..host_api.needs import Feature
from ..host_api.present import why_off
from ..reasons import Reason
from ..stepcache.cache import StepCache
from . import controlnet, deepcache, model, stepcache, vae
from .attached import Attached, LeftAlone, Note


class Objects:
    """Accepts MODEL, VAE and CONTROL_NET, and finds what was attached to them."""

    def __init__(self, off: Mapping[Feature, Reason]) -> None:
        """Set up; nothing is accepted yet.

        Args:
            off: which features are off with this host (`present.missing`).
        """
        self._off = off
        #: Why host objects on which we put nothing run as before.
        self._left: weakref.WeakKeyDictionary[Any, Note] = weakref.WeakKeyDictionary()

    def take_model(self, thing: Any) -> Attached:
        """Accept a MODEL for a session."""
        return self._leave(thing, Feature.EVERYTHING) or model.AttachedModel(thing)

    def take_vae(self, thing: Any, parts: str) -> Attached:
        """Accept a VAE for a session."""
        return self._leave(thing, Feature.VAES) or vae.AttachedVAE(thing, parts)

    def take_controlnet(self, thing: Any) -> Attached:
        """Accept a CONTROL_NET for a session.

        Raises:
            TypeError: it is not one.
        """
        left = self._leave(thing, Feature.CONTROLNETS)
        return left or controlnet.AttachedControlNet(thing, self._left)

    def carried(self, thing: Any) -> Any:
        """The session that a host object carries, or the note about it, or None."""
        if (note := self._left.get(thing)) is not None:
            return note
        if is_model(thing):
            return model.carried(thing)
        return controlnet.carried(thing) if is_control(thing) else vae.carried(thing)

    def deepcache(self, thing: Any) -> DeepCache | None:
        """The DeepCache that a MODEL carries; None for any other object."""
        off = why_off(self._off, Feature.DEEPCACHE)
        return deepcache.carried(thing) if off is None else None

    def stepcache(self, thing: Any) -> StepCache | None:
        """The Step Cache that a MODEL carries; None for any other object."""
        off = why_off(self._off, Feature.STEP_CACHE)
        return stepcache.carried(thing) if off is None else None

    def require(self, feature: Feature) -> None:
        """Require a feature.

        Raises:
            RequirementError: this host lacks something for it; the text says so for a user.
        """
        if (why := why_off(self._off, feature)) is not None:
            raise RequirementError(why)

    def _leave(self, thing: Any, feature: Feature) -> LeftAlone | None:
        why = why_off(self._off, feature)
        return None if why is None else LeftAlone(thing, why, self._left)
