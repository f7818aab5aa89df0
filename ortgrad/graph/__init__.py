"""Tools for graphs: recording, traversal, names; loading, checks and serialization; what exporters write."""
