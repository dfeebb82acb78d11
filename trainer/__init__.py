"""Around the step: the step itself, optimizer, schedule, validation, metrics and the run's record."""
