"""What other people's tasks say of a checkpoint, in the run's own record."""
