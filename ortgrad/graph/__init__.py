"""Working on graphs: recording nodes, walking, naming, types and shapes, reading and writing models."""
