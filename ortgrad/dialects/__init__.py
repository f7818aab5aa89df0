"""What others write, in terms of our operators and of standard ones."""
