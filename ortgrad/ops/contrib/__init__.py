"""Definitions of onnxruntime's own operators, which its optimizer puts into models, in standard operators."""
