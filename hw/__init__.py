"""Real hardware: stores, devices, executor, telemetry. Nothing is here yet."""
