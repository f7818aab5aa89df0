"""Tools for graphs: recording, traversal, names, types and shapes, loading and saving of models."""
