"""What is trained: modules, attention backends, losses, initial weights. Pure torch; knows no device mesh."""
