"""Incidents of a run that do not depend on how busy the machine is."""

from __future__ import annotations

import dppo


def lasting(result: dppo.Result) -> dict[str, int]:
    """Return the incidents without `samplers_moved`: on a busy machine an actor may start so late that they move."""
    return {kind: count for kind, count in result.incidents.items() if kind != "samplers_moved"}
