"""Training the built-in demonstration model: texts, network, optimiser, measures, export."""
