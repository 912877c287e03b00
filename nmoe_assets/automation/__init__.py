"""What the daemon requests: conditions of assets, sensors and the nightly check."""
