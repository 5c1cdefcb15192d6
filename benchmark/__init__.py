"""What produced the README's numbers."""
