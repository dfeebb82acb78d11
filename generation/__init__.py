"""From trained weights to text: where they come from, and how the next token is chosen."""
