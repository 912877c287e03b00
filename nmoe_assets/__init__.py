"""The platform: Dagster assets, checks, jobs and sensors over `nmoe_core`."""

from nmoe_assets.component import Mixture

__all__ = ["Mixture"]
