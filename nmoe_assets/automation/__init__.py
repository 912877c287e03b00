"""Automation: conditions of assets, sensors and the nightly check."""
