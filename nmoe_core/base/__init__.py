"""What every room stands on: errors, fingerprints, atomic writes, locks, strict tables."""
