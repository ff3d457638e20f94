"""What a plan has to say about the config that it follows, and of what no mode meets."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from qsim.config.config import Config
from qsim.config.override import SiteInfo
from qsim.graph.plan.actions import PlannedQuantizer
from qsim.graph.record.routes import Site


def unused_overrides(config: Config, sites: Iterable[SiteInfo]) -> list[str]:
    """A sentence for each override that is for none of the sites."""
    infos = list(sites)
    unused = [override for override in config.overrides if not any(override.matches(info) for info in infos)]
    return [f"the config's override {override} matches no operation" for override in unused]


def objections(config: Config, quantizers: Mapping[str, PlannedQuantizer]) -> list[str]:
    """A sentence for each field of a spec that an override gave another value than the target takes."""
    profile = config.profile
    return [
        f"{key!r} has {name}={got} by an override; target {profile.name!r} takes {name}={value}"
        for key, planned in quantizers.items()
        if not planned.spec.is_float
        for name, value in profile.decided("weight" if planned.role == "weight" else "activation").items()
        if (got := getattr(planned.spec, name)) != value
    ]


def unmet(site: Site) -> str:
    """Why no mode meets the calls of a site."""
    hook = any(step.hook for step in site.steps)
    return "runs in a hook, which is not of the model" if hook else f"Dynamo does not hand {site.op} to function modes"
