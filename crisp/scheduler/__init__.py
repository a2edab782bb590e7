"""The event scheduler: which expert loads, is computed and is evicted next. No clock, no device."""
