"""What am I waiting for: clocks, layers, simulator, comparison."""
