"""Which sequences a run reads, in which shares: settings, mixture, phases, the plan file."""
