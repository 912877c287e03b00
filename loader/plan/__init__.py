"""The plan of a run: settings, mixture, phases, schedule and the plan's file."""
