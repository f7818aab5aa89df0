"""What a session makes of a model: fused nodes, other operators in the place of nodes, ways to run nodes."""
