"""What is known about the types, ranks and sizes of values, and which sizes are always equal."""
